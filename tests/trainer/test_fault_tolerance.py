"""Which checkpoint a run goes on from when it has lost a worker."""

import json

import pytest
from same_training import course
from trainer.runs import fit

from verl.component import BuildContext
from verl.errors import WorkerDied
from verl.trainer import train_loop
from verl.trainer.train_loop import fit_with_restarts, last_checkpoint_of


@pytest.mark.exhaustive
def test_a_run_goes_on_from_its_own_checkpoints_and_never_from_those_of_an_earlier_run(model32, tmp_path):
    fit(course(model32, tmp_path, stop_after=3), tmp_path / "earlier")
    with course(model32, tmp_path, stop_after=2).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert last_checkpoint_of(trainer.saving) is None
        assert trainer.fit().checkpoints
        assert last_checkpoint_of(trainer.saving) == str(tmp_path / "checkpoints/global_step_2-2")


def test_a_trainer_is_built_anew_in_the_same_place_and_ends_as_if_nothing_had_been(model32, tmp_path):
    lost = [WorkerDied(0, "actor.update", 3, "the process ended")]
    with course(model32, tmp_path).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        step, restart, statuses = trainer.step, trainer.restart, []

        def step_and_lose(batch, number):
            if number == 3:
                raise lost.pop()
            return step(batch, number)

        def restart_and_look(*given):
            statuses.append(json.loads((tmp_path / "run/summary.json").read_text())["status"])
            restart(*given)

        trainer.step, trainer.restart = step_and_lose, restart_and_look
        result = fit_with_restarts(trainer, lambda may_restart: _as_it_is(trainer, may_restart), max_restarts=1)
    assert (statuses, result.status, result.steps) == (["restarting"], "finished", 4)
    assert result.restarts == ["rank 0 failed in actor.update at step 3"]
    assert result.checkpoints == ["global_step_3", "global_step_4"]


def _as_it_is(trainer, may_restart):
    """One fit; after a loss the trainer's own step is back."""
    try:
        return train_loop.fit(trainer, may_restart=may_restart)
    finally:
        vars(trainer).pop("step", None)
