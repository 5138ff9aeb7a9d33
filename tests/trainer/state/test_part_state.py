"""An estimator or a loss with state of its own goes on from a checkpoint as if there had been no end."""

from __future__ import annotations

import dataclasses
import json

import pytest
from same_training import course, newest, same_training, saved
from trainer.runs import BRIEF_GRPO, GRPO_ALGORITHM, HeatingLoss, RunningBaseline, fit, ppo_run

from verl.component import BuildContext
from verl.engines.sharding import DDP
from verl.errors import ConfigError, NonFiniteError
from verl.monitoring.nonfinite import NonFiniteGuard

BASELINE = dataclasses.replace(GRPO_ALGORITHM, advantage=RunningBaseline())
HEATING = dataclasses.replace(GRPO_ALGORITHM, policy_loss=HeatingLoss())
TWO = {"sharding": DDP(), "n_gpus_per_node": 2, "num_threads": 2}


def finished(directory, model, algorithm, **options):
    assert fit(course(model, directory, algorithm, **options), directory / "run").status == "finished"
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "entry", "options"),
    [
        (BASELINE, "advantage", {}),
        (HEATING, "policy_loss", {}),
        pytest.param(HEATING, "policy_loss", TWO, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_bit_by_bit_with_the_state_that_its_part_had(algorithm, entry, options, model32, tmp_path):
    whole = finished(tmp_path / "whole", model32, algorithm, **options)
    state = json.loads((newest(whole).directory / "scheduler/state.json").read_text())[entry]
    assert state == ({"total": state["total"], "count": 24} if entry == "advantage" else {"ranks": state["ranks"]})
    point = whole / "checkpoints/global_step_2"
    resumed = finished(tmp_path / "resumed", model32, algorithm, resume=point, **options)
    same_training(saved(resumed), saved(whole), after=2)


@pytest.mark.exhaustive
def test_state_of_two_processes_is_not_loaded_into_one(model32, tmp_path):
    finished(tmp_path, model32, HEATING, **TWO, total_steps=2)
    with pytest.raises(ConfigError, match="policy_loss keeps state in each process: the checkpoint has that of 2"):
        fit(course(model32, tmp_path, HEATING, resume="latest"), tmp_path / "second")


def test_a_step_that_is_skipped_leaves_the_state_as_it_was(model32, tmp_path, monkeypatch):
    run = ppo_run(model32, dataclasses.replace(BRIEF_GRPO, advantage=RunningBaseline()))
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        trainer.step(trainer.train_data.collate([0, 1]), 1)
        assert trainer.advantage.count == 4

        def refuse(guard, rows, where):
            if where == "credit":
                raise NonFiniteError("advantages")

        monkeypatch.setattr(NonFiniteGuard, "inspect", refuse)
        with pytest.raises(NonFiniteError):
            trainer.step(trainer.train_data.collate([2, 3]), 2)
        assert trainer.advantage.count == 4
