"""An algorithm says what a run needs, and refuses numbers that make no sense and parts that keep state of their own,
which no checkpoint would hold.
"""

import functools
from typing import Any, ClassVar

import pytest
import torch
from refusals import refused

from verl.algorithms.advantages import GAE, GRPO, AdvantageEstimator
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KLInLoss, KLInReward, NoKL
from verl.algorithms.losses import ClippedValueLoss, PolicyLoss, PPOClip
from verl.component import component
from verl.ops.masking import AGGREGATIONS
from verl.protocol import DataProto


@pytest.mark.parametrize(
    ("advantage", "kl", "needs"),
    [
        (GAE(), NoKL(), (True, False, False)),
        (GAE(), KLInReward(coef=0.01), (True, False, True)),
        (GRPO(), KLInLoss(coef=0.01), (False, True, True)),
        (GRPO(), KLInLoss(coef=0.0), (False, True, False)),
    ],
)
def test_what_a_run_needs_follows_from_the_parts(advantage, kl, needs):
    algorithm = Algorithm(advantage=advantage, policy_loss=PPOClip(), kl=kl)
    assert (algorithm.needs_values, algorithm.needs_groups, algorithm.needs_reference) == needs


def test_the_defaults_are_one_pass_with_neither_kl_nor_entropy():
    algorithm = Algorithm(advantage=GAE(), policy_loss=PPOClip())
    assert (algorithm.value_loss, algorithm.kl) == (ClippedValueLoss(), NoKL())
    assert (algorithm.epochs, algorithm.mini_batches, algorithm.entropy_coef) == (1, 1, 0.0)


def test_the_entropy_bonus_changes_linearly_from_the_first_update_to_the_last():
    falling = Algorithm(advantage=GAE(), policy_loss=PPOClip(), entropy_coef=0.04, final_entropy_coef=0.0)
    assert [falling.entropy_coef_at(update, 5) for update in range(5)] == pytest.approx([0.04, 0.03, 0.02, 0.01, 0.0])
    assert falling.entropy_coef_at(9, 5) == 0.0  # a run that goes on longer than was planned
    constant = Algorithm(advantage=GAE(), policy_loss=PPOClip(), entropy_coef=0.04)
    assert {constant.entropy_coef_at(update, 5) for update in range(5)} == {0.04}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation_can_be_chosen(mode):
    length = 5 if mode.endswith("-norm") else None
    algorithm = Algorithm(advantage=GAE(), policy_loss=PPOClip(), aggregation=mode, norm_length=length)
    assert algorithm.aggregation == mode


def of(advantage=None, policy_loss=None, **settings):
    """What makes an algorithm with these parts."""
    return lambda: Algorithm(advantage=advantage or GAE(), policy_loss=policy_loss or PPOClip(), **settings)


test_what_makes_no_sense_is_refused_all_at_once = refused(
    (("entropy_coef", "epochs", "mini_batches"), -0.5, of(entropy_coef=-0.5, epochs=0, mini_batches=-2)),
    ("advantage", "AdvantageEstimator", of(PPOClip())),
    ("aggregation", "mean", of(aggregation="mean")),
    ("norm_length", 5, of(aggregation="token-mean", norm_length=5)),  # which another aggregation reads
    ("norm_length", None, of(aggregation=AGGREGATIONS[-1])),
    *(("norm_length", 0, of(aggregation=mode, norm_length=0)) for mode in ("token-mean", AGGREGATIONS[-1])),
)


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
test_a_part_with_state_of_its_own_is_refused = refused(
    *(("advantage", kind.__name__, of(kind())) for kind in KEEPING),
    ("policy_loss", "CountingLoss", of(policy_loss=CountingLoss())),
    ("value_loss", "CountingValueLoss", of(value_loss=CountingValueLoss())),
)


def test_what_draws_at_random_or_caches_what_never_changes_is_taken():
    before = torch.random.get_rng_state()
    Algorithm(advantage=Stateless(), policy_loss=PPOClip())
    assert torch.equal(torch.random.get_rng_state(), before)


class Baseline:
    """Counts its calls; `kept` is what its state has of that."""

    def __init__(self, kept):
        self.calls, self.kept = 0, kept

    def __call__(self, batch):
        self.calls += 1
        return less(batch, float(self.calls))

    def state_dict(self):
        return self.kept(self.calls)

    def load_state_dict(self, state):
        self.calls = state.get("calls", self.calls)


@component
class Kept(AdvantageEstimator):
    how: str = "whole"

    def build(self, context):
        ways = {
            "whole": lambda n: {"calls": n},
            "forgets": lambda n: {},
            "tensor": lambda n: {"calls": torch.tensor(n)},
        }
        return Baseline(ways[self.how])


@component
class KeptByItself(AdvantageEstimator):
    def __call__(self, batch):
        object.__setattr__(self, "n", getattr(self, "n", 0) + 1)
        return less(batch, float(self.n))

    def state_dict(self):
        return {"n": getattr(self, "n", 0)}

    def load_state_dict(self, state):
        object.__setattr__(self, "n", state["n"])


def test_an_estimator_whose_state_dict_holds_its_state_is_taken():
    for estimator in (Kept(), KeptByItself()):
        Algorithm(advantage=estimator, policy_loss=PPOClip())
        assert vars(estimator).get("n") is None  # the trial used a copy


test_a_state_dict_that_does_not_bring_everything_back_is_refused = refused(
    ("advantage", "load_state_dict", of(Kept(how="forgets"))), ("advantage", "state_dict", of(Kept(how="tensor")))
)
