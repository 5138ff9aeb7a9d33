"""RayPPOTrainer: roles move to Ray one by one, from a short script."""

from __future__ import annotations

import os
import signal

import pytest
from cluster.ray_here import all_gone

from verl.cluster.local_worker_group import InlineWorkerGroup
from verl.cluster.ray.ray_worker_group import RayWorkerGroup
from verl.errors import ConfigError
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
    ("override", "fault"),
    [
        ("trainer.placement.pools={a:[judge]}", "trainer.placement.pools names the role 'judge'"),
        ("trainer.placement.pools={a:[critic],b:[critic]}", "'critic' 2 times"),
        ("trainer.placement.workers={values:1}", "trainer.placement.workers names the pool 'values'"),
        ("trainer.placement.workers={main:2}", r"the pool main \(actor, critic, reference\) has 2 workers"),
        ("trainer.placement.in_driver=[actor,critic,reference]", "no role is left for Ray"),
        ("trainer.placement.address='ray://head:10001'", "a driver outside the cluster is not supported"),
        ("trainer.placement.object_store_mib=10", "object_store_mib is 10: must be at least 75, or null"),
        ("trainer.placement.strategy=TIGHT", "trainer.placement.strategy is 'TIGHT': expected one of PACK"),
        ("trainer.placement.call_timeout_s=0", r"trainer\.placement\.call_timeout_s is 0: must be above 0"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_before_ray_starts(override, fault, dir32):
    with pytest.raises(ConfigError, match=fault):
        RayPPOTrainer(None, ROWS, overrides=small(dir32, override))
