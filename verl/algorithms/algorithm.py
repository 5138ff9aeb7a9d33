"""An algorithm: an advantage estimator, a policy loss, a value loss and a KL control, and how they are applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from verl.algorithms.advantages import AdvantageEstimator
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import KLControl, NoKL
from verl.algorithms.losses import ClippedValueLoss, PolicyLoss, ValueLoss
from verl.algorithms.own_state import state_fault
from verl.component import Description, component
from verl.ops.loss_aggregation import Aggregation

NORMED = "seq-mean-token-sum-norm"


@component
class Algorithm(Description):
    """The algorithm of a run. The training loop uses its properties (`needs_values`, ...), never its name.

    Args:
        advantage: advantage estimator.
        policy_loss: policy loss per token.
        value_loss: value loss per token; used only if the estimator needs values.
        kl: KL control.
        entropy_coef: coefficient of the entropy bonus, at least 0, in loss per nat.
        final_entropy_coef: its value at the last update, reached linearly; null keeps it constant.
        aggregation: how losses per token become a scalar, see verl.ops.loss_aggregation.
        norm_length: divisor in tokens of seq-mean-token-sum-norm; null with any other aggregation.
        correction: importance weights for differences between rollout engine and trainer; null for none.
        selection: dynamic sampling; null to train on all groups.
        epochs: passes over the batch of a step.
        mini_batches: optimizer steps per pass.
        replay_fraction: fraction of a step's rows that come from the replay buffer, in [0, 1), as far as it has enough.
            They are weighted by `correction`, or by `TruncatedIS()` if that is null; see
            `verl.algorithms.importance_sampling`.
        replay_max_staleness: the most policy versions (optimizer steps) that such a row may be behind; null for no
            limit.
    Raises:
        ConfigError: a number outside its range.
    """

    advantage: AdvantageEstimator
    policy_loss: PolicyLoss
    value_loss: ValueLoss = field(default_factory=ClippedValueLoss)
    kl: KLControl = field(default_factory=NoKL)
    entropy_coef: NonNegativeFloat = 0.0
    final_entropy_coef: NonNegativeFloat | None = None
    aggregation: Aggregation = "token-mean"
    norm_length: PositiveInt | None = None
    correction: TruncatedIS | None = None
    selection: DynamicSampling | None = None
    epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    replay_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    replay_max_staleness: PositiveInt | None = 16

    @property
    def needs_values(self) -> bool:
        """Whether the run needs a critic."""
        return self.advantage.needs_values

    @property
    def needs_groups(self) -> bool:
        """Whether a prompt needs more than one response."""
        return self.advantage.needs_groups or self.selection is not None

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each prompt also needs a greedy response with its score."""
        return self.advantage.needs_greedy_baseline

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether log-probs of the policy that sampled are needed before the update.

        With one optimizer step per batch the update itself computes them.
        """
        weighs = self.correction is not None or self.replay_fraction > 0
        return self.epochs * self.mini_batches > 1 or weighs or self.kl.needs_old_log_probs

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a reference."""
        return self.kl.needs_reference

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether some update of the run has an entropy bonus; all of them then have its metric."""
        return self.entropy_coef > 0 or bool(self.final_entropy_coef)

    def entropy_coef_at(self, update: int, total_updates: int) -> float:
        """Loss per nat of entropy at an optimizer step, counted from 0, of so many in the run."""
        if self.final_entropy_coef is None:
            return self.entropy_coef
        share = min(1.0, update / max(1, total_updates - 1))
        return self.entropy_coef + share * (self.final_entropy_coef - self.entropy_coef)

    def faults(self) -> Iterator[str]:
        if self.aggregation != NORMED and self.norm_length is not None:
            yield f"norm_length is {self.norm_length}: only aggregation={NORMED} uses it. Set it to null."
        if self.aggregation == NORMED and self.norm_length is None:
            yield f"norm_length is {self.norm_length}: aggregation={NORMED} needs a number of tokens, at least 1."
        for name in ("advantage", "policy_loss", "value_loss"):
            if (fault := state_fault(getattr(self, name), name)) is not None:
                yield fault
