"""Batches that were begun ahead are rated while the trainer works, and nothing of it is seen in the numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import pytest
from same_training import course, numbers, same_training, saved
from trainer.runs import GRPO_ALGORITHM, fit, step_lines

from verl.algorithms.importance_sampling import TruncatedIS
from verl.component import BuildContext, component
from verl.rewards.base import Reward, RewardDescription
from verl.rewards.normalization import RewardNormalization
from verl.rewards.weighted_sum import WeightedSum
from verl.rollout.hf import HFRollout
from verl.trainer.train_loop import TrainLoop

CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)
CALLS: list[tuple[str, list[str]]] = []  # thread and prompts of each call in training


@component
class Counted(RewardDescription):
    """A reward that counts its calls, and fails on a batch of these prompts."""

    fails_on: tuple[str, ...] = ()

    def build(self, context: BuildContext) -> Reward:
        return CountedReward(self)


class CountedReward(Reward):
    """The reward that `Counted` builds."""

    call_timeout_s = None
    rates_ahead = True

    def __init__(self, described: Counted):
        self.described = described
        self.counts, self.is_frozen = 0, False

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        if not self.is_frozen:
            self.counts += len(prompts)
            CALLS.append((threading.current_thread().name, prompts))
        if tuple(prompts) == self.described.fails_on:
            raise ValueError("planted")
        return [sum(map(ord, text)) % 17 / 16 for text in responses]

    def take(self) -> dict[str, float]:
        counts, self.counts = self.counts, 0
        return {"counted": float(counts)}

    @contextlib.contextmanager
    def frozen(self) -> Any:
        self.is_frozen = True
        yield
        self.is_frozen = False


def ahead(model: Any, directory: Any, reward: RewardDescription, **options: Any) -> Any:
    settings = {"mode": "async", "max_staleness": 2, "prompts_per_step": 2, "eval_interval": 2, **options}
    return course(model, directory, CORRECTED, reward=reward, **settings)


def engine_of(weight_update: Any) -> HFRollout:
    """Responses of some length, so that some are there while the trainer works."""
    return HFRollout(max_new_tokens=7, weight_update=weight_update, kv_cache="recompute")


# two parts of a sum, one with statistics, and statistics of the sum
PARTS = {"plain": Counted(), "scaled": RewardNormalization(reward=Counted())}
SUM = RewardNormalization(reward=WeightedSum(parts=PARTS, weights={"plain": 0.5, "scaled": 2.0}))


@pytest.mark.parametrize(
    ("reward", "weight_update"),
    [
        pytest.param(Counted(), "drain", marks=pytest.mark.exhaustive),
        (SUM, "drain"),
        (SUM, "in_flight"),
    ],
)
def test_metrics_statistics_and_checkpoints_are_those_of_a_run_that_rates_in_turn(
    reward, weight_update, model32, tmp_path, monkeypatch
):
    threads: dict[bool, set[str]] = {}
    options: dict[str, Any] = {"rollout": engine_of(weight_update)}
    for rates_ahead in (False, True):
        CALLS.clear()
        monkeypatch.setattr(CountedReward, "rates_ahead", rates_ahead)
        fit(ahead(model32, tmp_path / str(rates_ahead), reward, **options), tmp_path / str(rates_ahead) / "run")
        if weight_update == "in_flight":
            options["replay_schedule"] = str(tmp_path / "False/run")
        threads[rates_ahead] = {thread for thread, _ in CALLS}
    assert all(thread.startswith("responses ahead") for thread in threads[True] - threads[False])
    assert threads[True] > threads[False] == {"MainThread"}
    same_training(saved(tmp_path / "True"), saved(tmp_path / "False"))
    counted = [line[key] for line in step_lines(tmp_path / "True/run") for key in line if key.endswith("counted")]
    assert set(counted) == {4.0}  # rows of a step, each step


@pytest.mark.parametrize("weight_update", ["drain", pytest.param("in_flight", marks=pytest.mark.exhaustive)])
def test_a_resumed_run_rates_what_was_begun_before_and_goes_on_the_same(weight_update, model32, tmp_path):
    options: dict[str, Any] = {"rollout": engine_of(weight_update)}
    fit(ahead(model32, tmp_path / "whole", SUM, **options), tmp_path / "whole/run")
    if weight_update == "in_flight":
        options["replay_schedule"] = str(tmp_path / "whole/run")
    resume = tmp_path / "whole/checkpoints/global_step_2"
    fit(ahead(model32, tmp_path, SUM, resume=resume, **options), tmp_path / "run")
    same_training(saved(tmp_path), saved(tmp_path / "whole"), after=2)


def test_a_reward_that_fails_ahead_ends_the_run_at_its_step_with_the_same_words(model32, tmp_path, monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(CountedReward, "rates_ahead", False)
    fit(ahead(model32, tmp_path / "sound", Counted()), tmp_path / "sound/run")
    errors, prompts = [], tuple(CALLS[2][1])
    for rates_ahead in (False, True):
        directory = tmp_path / str(rates_ahead)
        monkeypatch.setattr(CountedReward, "rates_ahead", rates_ahead)
        reward = Counted(fails_on=prompts)
        with pytest.raises(ValueError, match="planted") as error:
            fit(ahead(model32, directory, reward), directory / "run")
        errors.append(str(error.value))
        assert list(numbers(directory / "run")) == [1, 2]
    assert errors[0] == errors[1]


def test_a_reward_that_is_replaced_rates_what_was_begun_before_anew(model32, tmp_path):
    with ahead(model32, tmp_path, Counted()).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        loop = TrainLoop(trainer, {})
        loop.open()
        loop.step()
        trainer.pipeline.collect()
        trainer.replace_reward(SUM)
        loop.step()
    last = step_lines(tmp_path / "run")[-1]
    assert {"reward/plain", "reward/scaled", "reward/raw"} <= last.keys()
