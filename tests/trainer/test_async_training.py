"""Asynchronous training: equal to the synchronous one at staleness 0, resumable, and strict in order and age."""

from __future__ import annotations

import dataclasses

import pytest
from same_training import course, numbers, same_training, saved
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, fit, weights

from verl.algorithms.importance_sampling import TruncatedIS
from verl.trainer.ppo import PPOTrainer

CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)


def asynchronous(model, directory, staleness=1, algorithm=CORRECTED, **options):
    settings = {"mode": "async", "max_staleness": staleness, "prompts_per_step": 2, **options}
    return course(model, directory, algorithm, **settings)


@pytest.mark.parametrize("algorithm", [CORRECTED, PPO_ALGORITHM])
def test_staleness_0_is_the_synchronous_training(algorithm, model32, tmp_path):
    options = {"algorithm": algorithm, "eval_interval": 2}
    fit(asynchronous(model32, tmp_path / "sync", mode="sync", **options), tmp_path / "sync/run")
    fit(asynchronous(model32, tmp_path / "async", 0, **options), tmp_path / "async/run")
    one, other = numbers(tmp_path / "sync/run"), numbers(tmp_path / "async/run")
    assert one.keys() == other.keys()
    for step, line in one.items():
        assert {key: other[step][key] for key in line} == line
        assert other[step]["async/lag_0_share"] == 1
    left, right = weights(tmp_path / "sync"), weights(tmp_path / "async")
    assert left.keys() == right.keys()
    assert all(x.equal(right[name]) for name, x in left.items())
