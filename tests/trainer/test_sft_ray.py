"""Supervised fine-tuning in Ray: the same numbers as in the driver's own process, restarts, and what is refused."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from cluster.ray_here import all_gone, placed
from refusals import refusal
from trainer.test_sft import sft_run

from verl.checkpoint.config import Checkpointing
from verl.cluster.ray.ray_worker_group import RayWorkerGroup
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.engines.sharding import DDP
from verl.errors import ConfigError

pytestmark = pytest.mark.xdist_group("ray")


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

    submit, killed = RayWorkerGroup.submit, []

    def submit_and_kill(cluster, role, method, args):
        if method == "update" and cluster.step == 3 and not killed:
            killed.extend(cluster.pids)
            os.kill(cluster.pids[-1], signal.SIGKILL)
        return submit(cluster, role, method, args)

    monkeypatch.setattr(RayWorkerGroup, "submit", submit_and_kill)
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
    assert killed == pids
    assert all_gone(killed)


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
