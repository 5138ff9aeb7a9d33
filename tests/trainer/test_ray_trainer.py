"""RayPPOTrainer, with roles that move to Ray one by one, and supervised fine-tuning in Ray."""

from dataclasses import replace

import pytest
from cluster.ray_here import all_gone, kill_in, placed
from refusals import refusal
from trainer.test_sft import sft_run

from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.engines.sharding import DDP
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


@pytest.mark.first_rows(3)
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


# Supervised fine-tuning


def with_settings(run, **settings):
    return replace(run, trainer=replace(run.trainer, **settings))


def evaluations(run, directory):
    """Evaluations, restarts, and the process ids of workers in Ray."""
    with run.build(BuildContext(run_dir=directory)) as trainer:
        first = [pid for _, group in getattr(trainer.cluster, "groups", []) for pid in group.pids]
        result = trainer.fit()
    assert result.status == "finished"
    return result.evaluations, result.restarts, first


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_here")
def test_workers_in_ray_train_what_this_process_trains_and_a_lost_one_is_replaced(dir32, tmp_path, monkeypatch):
    run = sft_run(dir32, tmp_path)
    alone, _, _ = evaluations(run, tmp_path / "alone")
    one, _, pids = evaluations(with_settings(run, placement=placed()), tmp_path / "one")
    assert one == alone
    assert all_gone(pids)

    seen = kill_in(monkeypatch, "learner.update", step=3)
    saves = Checkpointing(save_dir=str(tmp_path / "checkpoints"), save_interval=1, save_async=False)
    two = replace(run, checkpoint=saves, sharding=DDP(timeout_s=60.0))
    two = with_settings(two, placement=placed(max_restarts=1), n_gpus_per_node=2)
    again, restarts, pids = evaluations(two, tmp_path / "two")
    assert len(restarts) == 1
    assert "rank 1 failed in learner." in restarts[0]
    assert "at step 3" in restarts[0]
    assert [*again] == [*alone]
    for step, metrics in again.items():
        assert metrics == pytest.approx(alone[step], rel=1e-5)
    assert seen[:2] == pids
    assert all_gone(seen)


@pytest.mark.first_rows(2)
@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["trainer.n_gpus_per_node=2"], "trainer.placement.pools"),
        (["trainer.nnodes=2", "sharding=ddp"], "trainer.nnodes"),
        (["+trainer.placement.in_driver=[actor]"], "trainer.placement.in_driver"),
        (["trainer.placement.strategy=TIGHT"], "trainer.placement.strategy"),
        (["debug=profile"], "trainer.profile"),
    ],
)
def test_a_placement_of_supervised_fine_tuning_that_cannot_be_is_refused(words, path):
    with refusal(path):
        run = validate(compose_root("sft", ["trainer=sft_ray", *words]))
        raise ConfigError([f"trainer.{fault}" for fault in run.trainer.machine_faults()])
