"""RayPPOTrainer: roles move to Ray one by one, from a short script."""

from __future__ import annotations

import os
import signal

import pytest
from cluster.ray_here import all_gone
from refusals import refusal

from verl.cluster.local_worker_group import InlineWorkerGroup
from verl.cluster.ray.ray_worker_group import RayWorkerGroup
from verl.trainer.ray_trainer import RayPPOTrainer

pytestmark = pytest.mark.xdist_group("ray")


def small(dir32, *more: str) -> list[str]:
    return [
        "actor=pretrained", f"actor.model.path={dir32}", "trainer.total_steps=1", "trainer.prompts_per_step=2",
        "trainer.eval_samples=0", "trainer.eval_before=false", "trainer.save_final=false", "checkpoint=off",
        "rollout.max_new_tokens=4", "data.max_prompt_length=12", "tracker=none",
        "trainer.placement.num_cpus=0.5", *more,
    ]  # fmt: skip


ROWS = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_here")
def test_a_role_that_is_not_used_in_ray_stays_in_this_process_and_the_others_move(dir32):
    with RayPPOTrainer(None, ROWS, use_critic=False, overrides=small(dir32)) as trainer:
        where = {role: type(cluster) for roles, cluster in trainer.trainer.cluster.groups for role in roles}
        assert where == {"actor": RayWorkerGroup, "reference": RayWorkerGroup, "critic": InlineWorkerGroup}
        (pids,) = (cluster.pids for _, cluster in trainer.trainer.cluster.groups if isinstance(cluster, RayWorkerGroup))
        assert trainer.fit().status == "finished"
    assert all_gone(pids)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_here")
def test_a_trainer_of_a_script_goes_on_after_a_loss_too(dir32, monkeypatch):
    submit, killed = RayWorkerGroup.submit, []

    def submit_and_kill(cluster, role, method, args):
        if method == "update" and cluster.step == 2 and not killed:
            killed.extend(cluster.pids)
            os.kill(cluster.pids[0], signal.SIGKILL)
        return submit(cluster, role, method, args)

    monkeypatch.setattr(RayWorkerGroup, "submit", submit_and_kill)
    saving = ["checkpoint=sync", "checkpoint.save_interval=1", "trainer.total_steps=2", "algorithm=grpo"]
    with RayPPOTrainer(None, ROWS, overrides=small(dir32, *saving)) as trainer:
        result = trainer.fit()
        assert trainer.steps == 2
    assert (result.status, result.steps) == ("finished", 2)
    stages = ("update", "wait_copied")  # asked for just before it, and perhaps not heard of yet
    assert [*result.restarts] in [[f"rank 0 failed in actor.{stage} at step 2"] for stage in stages]
    assert all_gone(killed)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("pools={a:[judge]}", "judge"),
        ("pools={a:[critic],b:[critic]}", "critic"),
        ("workers={values:1}", "values"),
        ("in_driver=[actor,critic,reference]", "actor, critic, reference"),
        ("address='ray://head:10001'", "ray://head:10001"),
        ("object_store_mib=10", 10),
        ("strategy=TIGHT", "TIGHT"),
        ("call_timeout_s=0", 0),
    ],
)
def test_a_placement_that_cannot_be_is_refused_before_ray_starts(override, value, dir32):
    with refusal(f"trainer.placement.{override.partition('=')[0]}", value=value):
        RayPPOTrainer(None, ROWS, overrides=small(dir32, f"trainer.placement.{override}"))
    with refusal("trainer.placement.workers.main", value=2):
        RayPPOTrainer(None, ROWS, overrides=small(dir32, "trainer.placement.workers={main:2}"))
