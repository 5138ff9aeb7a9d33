"""Advantage estimators and losses that keep state of their own are refused at the start: no checkpoint holds it."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from refusals import refusal

from verl.algorithms.advantages import GAE, AdvantageEstimator
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.losses import ClippedValueLoss, PolicyLoss, PPOClip
from verl.component import component
from verl.protocol import DataProto

HISTORY: list[float] = []
count = 0


class Mean:
    """A running mean."""

    def __init__(self):
        self.total, self.number = 0.0, 0

    def add(self, x: float) -> float:
        self.total, self.number = self.total + x, self.number + 1
        return self.total / self.number


RUNNING = Mean()


def less(batch: Any, baseline: float) -> DataProto:
    advantages = (batch["token_level_rewards"] - baseline) * batch["response_mask"]
    return DataProto.from_dict({"advantages": advantages, "returns": advantages})


@component
class InAList(AdvantageEstimator):
    def __call__(self, batch):
        HISTORY.append(float(batch["token_level_rewards"].mean()))
        return less(batch, sum(HISTORY) / len(HISTORY))


@component
class InAGlobal(AdvantageEstimator):
    def __call__(self, batch):
        global count
        count += 1
        return less(batch, 0.0 if count < 100 else 1.0)


@component
class InAnObject(AdvantageEstimator):
    def __call__(self, batch):
        return less(batch, RUNNING.add(float(batch["token_level_rewards"].mean())))


@component
class InTheClass(AdvantageEstimator):
    calls: ClassVar[dict[str, int]] = {"n": 0}

    def __call__(self, batch):
        self.calls["n"] += 1
        return less(batch, 0.0)


@component
class InItself(AdvantageEstimator):
    def __call__(self, batch):
        self.mean = 0.0
        return less(batch, 0.0)


@component
class AroundTheFreeze(AdvantageEstimator):
    def __call__(self, batch):
        object.__setattr__(self, "n", getattr(self, "n", 0) + 1)
        return less(batch, 1.0 / self.n)


@component
class OfOwnColumns(AdvantageEstimator):
    def __call__(self, batch):
        object.__setattr__(self, "n", len(batch["a column of my data"]))
        return less(batch, 0.0)


@component
class WithAStateDict(AdvantageEstimator):
    def __call__(self, batch):
        return less(batch, batch["a column of my data"])

    def state_dict(self):
        return {}


@component
class Stateless(AdvantageEstimator):
    def __call__(self, batch):
        return less(batch, float(torch.rand(())) + table(4))


@functools.cache
def table(n: int) -> int:
    return n


@component
class CountingLoss(PolicyLoss):
    seen: ClassVar[list[int]] = []

    def __call__(self, log_probs, batch):
        self.seen.append(1)
        return -log_probs * batch["advantages"] * len(self.seen), {}


@component
class CountingValueLoss(ClippedValueLoss):
    seen: ClassVar[list[int]] = []

    def __call__(self, values, batch):
        self.seen.append(1)
        return super().__call__(values, batch)


KEEPING = [InAList, InAGlobal, InAnObject, InTheClass, InItself, AroundTheFreeze, OfOwnColumns, WithAStateDict]


@pytest.mark.parametrize("kind", KEEPING)
def test_an_estimator_with_state_of_its_own_is_refused(kind):
    with refusal("advantage") as caught:
        Algorithm(advantage=kind(), policy_loss=PPOClip())
    assert str(caught.value).startswith(f"advantage is {kind.__name__}: ")


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ("policy_loss", {"policy_loss": CountingLoss()}),
        ("value_loss", {"policy_loss": PPOClip(), "value_loss": CountingValueLoss()}),
    ],
)
def test_a_loss_with_state_of_its_own_is_refused(field, parts):
    with refusal(field):
        Algorithm(advantage=GAE(), **parts)


def test_what_draws_at_random_or_caches_what_never_changes_is_taken():
    before = torch.random.get_rng_state()
    Algorithm(advantage=Stateless(), policy_loss=PPOClip())
    assert torch.equal(torch.random.get_rng_state(), before)
