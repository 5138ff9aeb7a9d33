"""A run in Ray that loses a worker goes on from its last checkpoint by itself, or says why it cannot."""

import dataclasses
import json
import os
import signal

import pytest
from cluster.ray_here import all_gone, placed
from equivalence.test_ray import numbers
from random_models import save_random_classifier
from rewards.rated import described
from same_training import course, newest
from trainer.runs import PPO_ALGORITHM, fit

from verl.checkpoint.read.reader import CheckpointReader
from verl.cluster.ray.ray_worker_group import RayWorkerGroup
from verl.errors import WorkerDied

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_here"), pytest.mark.slow]

CALLS = ["actor.compute_log_probs", "actor.generate", "reference.compute_log_probs", "critic.compute_values"]
CALLS += ["critic.update", "actor.update", "actor.sync", "actor.save_part", "actor.wait_copied", "rm.score"]
UNDER_WAY = ("actor.wait_copied", "idle")  # what a worker that is killed may have been at, beside the call


def digest(directory):
    """Without the generators: each process has its own."""
    return CheckpointReader(newest(directory)).digest(without=["rng"])


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A reward that is a model, and so a role."""
    return described(save_random_classifier(tmp_path_factory.mktemp("judge"), "llama"), normalize="running")


@pytest.fixture(scope="module")
def whole(model32, judge, tmp_path_factory):
    """The run that lost nobody."""
    directory = tmp_path_factory.mktemp("whole")
    fit(course(model32, directory, PPO_ALGORITHM, reward=judge), directory / "run")
    return directory


@pytest.fixture
def killing(monkeypatch):
    """Ends a worker in the midst of the first calls of a name in a step; returns the process ids of all workers."""
    pids = []

    def strike(call: str, step: int, times: int = 1, number: int = signal.SIGKILL):
        submit, left = RayWorkerGroup.submit, [times]

        def submit_and_kill(cluster, role, method, args):
            pids.extend(pid for pid in cluster.pids if pid not in pids)
            if f"{role}.{method}" == call and cluster.step == step and left[0]:
                left[0] -= 1
                os.kill(cluster.pids[-1], number)
            return submit(cluster, role, method, args)

        monkeypatch.setattr(RayWorkerGroup, "submit", submit_and_kill)
        return pids

    return strike


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", CALLS)
def test_a_worker_killed_in_any_stage_costs_the_step_and_nothing_else(
    call, whole, judge, killing, model32, tmp_path, caplog
):
    pids = killing(call, step=3)
    run = course(model32, tmp_path, PPO_ALGORITHM, reward=judge, placement=placed(max_restarts=1))
    result = fit(run, tmp_path / "run")
    assert (result.status, result.steps, len(result.restarts)) == ("finished", 4, 1)
    assert any(f"rank 0 failed in {name} at step 3" in result.restarts[0] for name in (call, *UNDER_WAY))
    assert "Restart 1 of at most 1, from" in caplog.text
    assert json.loads((tmp_path / "run/summary.json").read_text())["restarts"] == result.restarts
    assert numbers(tmp_path / "run") == numbers(whole / "run")
    assert digest(tmp_path) == digest(whole)
    assert len(pids) == 2
    assert all_gone(pids)


@pytest.mark.exhaustive
def test_without_checkpoints_the_run_ends_and_says_why(killing, model32, tmp_path):
    pids = killing("actor.update", step=1)
    run = dataclasses.replace(course(model32, tmp_path, placement=placed(max_restarts=1)), checkpoint=None)
    with pytest.raises(WorkerDied, match=r"rank 0 failed in actor\.update at step 1[\s\S]*keeps no checkpoints"):
        fit(run, tmp_path / "run")
    assert all_gone(pids)


@pytest.mark.exhaustive
def test_restarts_are_bounded_and_begin_anew_where_nothing_was_saved(killing, model32, tmp_path, caplog):
    pids = killing("actor.update", step=1, times=9)
    run = course(model32, tmp_path, placement=placed(max_restarts=1))
    with pytest.raises(WorkerDied, match=r"restarted 1 times before, and trainer\.placement\.max_restarts"):
        fit(run, tmp_path / "run")
    assert "from the beginning, for it had saved nothing yet" in caplog.text
    assert caplog.text.count("The run is restarting after step 0.") == 1  # the first loss ends nothing
    assert caplog.text.count("The run has failed after step 0.") == 1
    assert len(json.loads((tmp_path / "run/summary.json").read_text())["restarts"]) == 1
    assert all_gone(pids)
