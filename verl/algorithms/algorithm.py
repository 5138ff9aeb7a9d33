"""An algorithm: an advantage estimator, a policy loss, a value loss and a KL choice, and how they are applied."""

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
from verl.component import Description, component
from verl.ops.loss_aggregation import Aggregation

NORMED = "seq-mean-token-sum-norm"


@component
class Algorithm(Description):
    """What is done with a batch of scored responses; the loop asks it, and never its name, what a run needs.

    Args:
        advantage: credits rewards to tokens.
        policy_loss: per token.
        value_loss: per token; used only if the estimator needs values.
        kl: how the reference holds the policy.
        entropy_coef: loss per nat of entropy, at least 0: the entropy of each token is rewarded by it.
        final_entropy_coef: what `entropy_coef` comes to at the last update, linearly; null keeps it constant.
        aggregation: how losses per token become one, see verl.ops.loss_aggregation.
        norm_length: tokens that a response counts for under seq-mean-token-sum-norm; null under any other.
        correction: weights for an engine that samples from other numbers than those trained on; null for none.
        selection: which groups a step trains on; null for all.
        epochs: passes over the batch of a step.
        mini_batches: optimizer steps per pass.
        replay_fraction: share of the rows of a step that are old ones from the replay buffer, in [0, 1); as many come
            as it has. They are weighed by `correction`, or by `TruncatedIS()` where that is null; see
            `verl.algorithms.importance_sampling`.
        replay_max_staleness: policy versions (optimizer steps) that such a row may be behind; null for any.
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

        With one optimizer step they are those of the update itself, before it moves the weights.
        """
        weighs = self.correction is not None or self.replay_fraction > 0
        return self.epochs * self.mini_batches > 1 or weighs or self.kl.needs_old_log_probs

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a reference."""
        return self.kl.needs_reference

    def entropy_coef_at(self, update: int, total_updates: int) -> float:
        """Loss per nat of entropy at an optimizer step, counted from 0, of so many in the run."""
        if self.final_entropy_coef is None:
            return self.entropy_coef
        share = min(1.0, update / max(1, total_updates - 1))
        return self.entropy_coef + share * (self.final_entropy_coef - self.entropy_coef)

    def faults(self) -> Iterator[str]:
        if self.aggregation != NORMED and self.norm_length is not None:
            yield f"norm_length is {self.norm_length}: only aggregation={NORMED} reads it. Set it to null."
        if self.aggregation == NORMED and self.norm_length is None:
            yield f"norm_length is {self.norm_length}: aggregation={NORMED} needs a number of tokens, at least 1."
