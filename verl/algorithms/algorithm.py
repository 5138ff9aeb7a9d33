"""An algorithm: an advantage estimator, a policy loss, a value loss and a KL control, and how they are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from verl.algorithms.advantages import AdvantageEstimator
from verl.algorithms.distillation import Distillation
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.functions import state_fault
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import KLControl, NoKL
from verl.algorithms.losses import ClippedValueLoss, PolicyLoss, ValueLoss
from verl.component import Description, component
from verl.ops.masking import Aggregation
from verl.protocol import DataProto

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
        aggregation: how losses per token become a scalar, see verl.ops.masking.
        norm_length: divisor in tokens of seq-mean-token-sum-norm; null with any other aggregation.
        proximal: whose log-probs are `old_log_probs`, which the ratio of the policy loss starts from. `trainer`: those
            of the weights before the update, by a forward pass unless the only update computes them. `behaviour`: those
            that the rollout engine recorded, without a pass, so that the ratio corrects for older weights too.
        correction: importance weights for differences between rollout engine and trainer; null for none.
        selection: dynamic sampling; null to train on all groups.
        distill: learning from a teacher, which is the reference; null for none.
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
    proximal: Literal["trainer", "behaviour"] = "trainer"
    correction: TruncatedIS | None = None
    selection: DynamicSampling | None = None
    distill: Distillation | None = None
    epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    replay_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    replay_max_staleness: PositiveInt | None = 16

    @property
    def uses_rewards(self) -> bool:
        """Whether the policy is trained on rewards."""
        return self.distill is None or self.distill.coef < 1

    @property
    def needs_values(self) -> bool:
        """Whether the run needs a critic."""
        return self.uses_rewards and self.advantage.needs_values

    @property
    def needs_groups(self) -> bool:
        """Whether a prompt needs more than one response."""
        return (self.uses_rewards and self.advantage.needs_groups) or self.selection is not None

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each prompt also needs a greedy response with its score."""
        return self.uses_rewards and self.advantage.needs_greedy_baseline

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the trainer computes log-probs before the update.

        With one optimizer step per batch the update itself does.
        """
        if self.proximal == "behaviour":
            return False
        weighs = self.correction is not None or self.replay_fraction > 0
        of_teacher = self.distill is not None and self.distill.top_k is None
        return self.epochs * self.mini_batches > 1 or weighs or of_teacher or self.kl.needs_old_log_probs

    @property
    def needs_reference(self) -> bool:
        return self.kl.needs_reference or self.distill is not None

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens of the reference that the loss compares."""
        return 0 if self.distill is None else self.distill.top_k or 0

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

    def credit(
        self, batch: DataProto, estimator: Callable[[DataProto], DataProto]
    ) -> tuple[DataProto, dict[str, float]]:
        """`advantages` and `returns` [B T] of a batch with the inputs of the estimator, and metrics.

        Args:
            estimator: what `advantage` builds.
        """
        credit = estimator(batch) if self.uses_rewards else None
        if self.distill is not None:
            return self.distill.mixed_credit(credit, batch)
        assert credit is not None
        return credit, {}

    def faults(self) -> Iterator[str]:
        if self.distill is not None and self.kl.needs_reference:
            yield (
                f"kl is {type(self.kl).__name__}: with distill the reference is the teacher, and there is no "
                "other. Set kl={_target_:verl.algorithms.kl.NoKL}, or distill=null."
            )
        if self.aggregation != NORMED and self.norm_length is not None:
            yield f"norm_length is {self.norm_length}: only aggregation={NORMED} uses it. Set it to null."
        if self.aggregation == NORMED and self.norm_length is None:
            yield f"norm_length is {self.norm_length}: aggregation={NORMED} needs a number of tokens, at least 1."
        if self.proximal == "behaviour" and self.correction is not None:
            yield (
                "correction is set, and proximal is behaviour: old_log_probs are those of the rollout engine, so "
                "that all of its weights are 1. Set it to null, or proximal=trainer."
            )
        for name in ("advantage", "policy_loss", "value_loss"):
            if (fault := state_fault(getattr(self, name), name)) is not None:
                yield fault
