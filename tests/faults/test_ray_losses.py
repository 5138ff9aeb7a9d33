"""A run in Ray that loses a worker goes on from its last checkpoint by itself, or says why it cannot."""

import dataclasses
import json

import pytest
from cluster.ray_here import all_gone, kill_in, placed
from equivalence.test_ray import numbers
from random_models import save_random_classifier
from rewards.rated import described
from same_training import course, newest
from trainer.runs import PPO_ALGORITHM, fit

from verl.checkpoint.read.reader import CheckpointReader
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", CALLS)
def test_a_worker_killed_in_any_stage_costs_the_step_and_nothing_else(
    call, whole, judge, monkeypatch, model32, tmp_path, caplog
):
    pids = kill_in(monkeypatch, call, step=3)
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
def test_without_checkpoints_the_run_ends_and_says_why(monkeypatch, model32, tmp_path):
    pids = kill_in(monkeypatch, "actor.update", step=1)
    run = dataclasses.replace(course(model32, tmp_path, placement=placed(max_restarts=1)), checkpoint=None)
    with pytest.raises(WorkerDied, match=r"rank 0 failed in actor\.update at step 1[\s\S]*keeps no checkpoints"):
        fit(run, tmp_path / "run")
    assert all_gone(pids)


@pytest.mark.exhaustive
def test_restarts_are_bounded_and_begin_anew_where_nothing_was_saved(monkeypatch, model32, tmp_path, caplog):
    pids = kill_in(monkeypatch, "actor.update", step=1, times=9)
    run = course(model32, tmp_path, placement=placed(max_restarts=1))
    with pytest.raises(WorkerDied, match=r"restarted 1 times before, and trainer\.placement\.max_restarts"):
        fit(run, tmp_path / "run")
    assert "from the beginning, for it had saved nothing yet" in caplog.text
    assert caplog.text.count("The run is restarting after step 0.") == 1  # the first loss ends nothing
    assert caplog.text.count("The run has failed after step 0.") == 1
    assert len(json.loads((tmp_path / "run/summary.json").read_text())["restarts"]) == 1
    assert all_gone(pids)
