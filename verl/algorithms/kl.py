"""KL control, which keeps the policy near the reference: none, through the reward, or through the loss.

B responses, T response length. All KLs are of the policy to the reference, KL(pi || ref), in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from verl.component import BuildContext, Description, component
from verl.errors import ConfigError
from verl.ops.logprobs import ESTIMATORS, Estimator
from verl.ops.masking import masked_mean, masked_sum
from verl.protocol import DataProto

_COEFS = torch.finfo(torch.float32)


@component
class KLControl(Description):
    """Base class of KL controls; it changes neither reward nor loss."""

    @property
    def needs_reference(self) -> bool:
        """Whether the batch needs ref_log_probs."""
        return False

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the penalty uses old_log_probs, before the update."""
        return False

    def shape_rewards(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        """The rewards that advantages are computed from.

        Args:
            batch: token_level_scores, response_mask, [B, T]; ref_log_probs and old_log_probs if they are needed.
        Returns:
            token_level_rewards [B, T], 0 off the mask, and metrics.
        """
        return torch.where(batch["response_mask"], batch["token_level_scores"], 0.0), {}

    def state_dict(self) -> dict[str, float]:
        """State for resuming; empty if the coefficient is fixed."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved state; does nothing if the coefficient is fixed."""

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The term to add to the policy loss of each token, coefficient included.

        Args:
            log_probs: [B, T] nats, under the weights being updated; carries gradient.
            batch: response_mask and ref_log_probs, [B, T].
        Returns:
            [B, T], 0 off the mask; None if nothing is to be added.
        """
        return None

    def measure(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The KL of each token without the coefficient; its mean is the metric `kl/reference_nats`.

        Args:
            log_probs, batch: as in `loss`.
        Returns:
            [B, T] nats, 0 off the mask; None if the loss has no such term.
        """
        return None


@component
class NoKL(KLControl):
    """No reference, no penalty."""


@component
class _WeightedKL(KLControl):
    coef: NonNegativeFloat

    @property
    def needs_reference(self) -> bool:
        return self.coef > 0


@component
class KLInReward(_WeightedKL):
    """Subtract a KL penalty from the reward of each token.

        r_t = score_t - coef * estimate(log pi_old(y_t), log ref(y_t))

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2, whose log ratio is k1.
    Degenerate: coef 0 needs no reference and leaves the scores as they are.

    Metrics: `kl/reference_nats`, mean of the estimate over the tokens of the batch; `kl/penalty_mean`, mean
    penalty of a response.

    Args:
        coef: reward per nat, at least 0.
        estimator: k1, k2 or k3, see verl.ops.logprobs.
    Raises:
        ConfigError: coef below 0 or not finite.
    """

    estimator: Estimator = "k1"

    @property
    def needs_old_log_probs(self) -> bool:
        return self.needs_reference

    def shape_rewards(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        scores, metrics = super().shape_rewards(batch)
        if not self.needs_reference:
            return scores, metrics
        return self.subtract_kl(scores, batch, self.coef)[:2]

    def subtract_kl(self, scores: Tensor, batch: DataProto, coef: float) -> tuple[Tensor, dict[str, float], float]:
        """Rewards [B, T] less coef times the KL, metrics, and the mean KL of a response in nats."""
        mask = batch["response_mask"]
        kl = _estimate(self.estimator, batch["old_log_probs"], batch["ref_log_probs"], mask)
        of_responses = masked_mean(masked_sum(kl.double(), mask, dim=-1), mask.any(dim=-1)).item()
        penalties = masked_sum(coef * kl, mask, dim=-1)
        metrics = {
            "kl/reference_nats": masked_mean(kl, mask).item(),
            "kl/penalty_mean": masked_mean(penalties, mask.any(dim=-1)).item(),
        }
        return scores - coef * kl, metrics, of_responses


@component
class AdaptiveKLInReward(KLInReward):
    """KLInReward with a coefficient that is adapted so that the KL of a response approaches a target.

        e    = clip((KL - target) / target, -0.2, 0.2)
        coef <- coef * (1 + e * B / horizon)      after each batch of B responses

    KL is the mean over the responses of the sum of the estimates over their tokens. `build` makes the controller with
    the current coefficient; a batch is penalised with the coefficient from before its own update.

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2.
    Differs: B / horizon is at most 1, so that a batch changes the coefficient by at most a fifth. The coefficient is
    kept in the range of normal float32 numbers: a subnormal one could be rounded back to itself after each change.
    Degenerate: a batch without responses does not change the coefficient.

    Metrics: those of KLInReward; `kl/response_nats`, the controlled KL; `kl/coef`, the coefficient of the batch.

    Args:
        coef: initial coefficient, above 0.
        target: nats per response, above 0.
        horizon: number of responses that change the coefficient by a fifth at most, above 0.
    Raises:
        ConfigError: a number outside its range.
    """

    coef: PositiveFloat
    target: PositiveFloat
    horizon: PositiveFloat = 10000.0

    def build(self, context: BuildContext) -> AdaptiveKLController:
        return AdaptiveKLController(self)


class AdaptiveKLController:
    """The controller that AdaptiveKLInReward builds.

    Attributes:
        coef: coefficient for the next batch, in reward per nat.
    """

    def __init__(self, options: AdaptiveKLInReward):
        self.options, self.coef = options, options.coef

    def shape_rewards(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        """See `KLControl.shape_rewards`; also updates the coefficient."""
        options, scores = self.options, KLControl().shape_rewards(batch)[0]
        rewards, metrics, kl = options.subtract_kl(scores, batch, self.coef)
        metrics |= {"kl/response_nats": kl, "kl/coef": self.coef}
        if responses := int(batch["response_mask"].any(dim=-1).sum()):
            error = min(max(kl / options.target - 1, -0.2), 0.2)
            moved = self.coef * (1 + error * min(responses / options.horizon, 1.0))
            self.coef = min(max(moved, _COEFS.tiny), _COEFS.max)
        return rewards, metrics

    def state_dict(self) -> dict[str, float]:
        """`coef`, the only state."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved state.

        Raises:
            ConfigError: it is not a finite `coef` above 0.
        """
        if set(state) != {"coef"} or not 0 < state["coef"] < math.inf:
            raise ConfigError(f"state is {dict(state)!r}: expected a finite coef above 0.")
        self.coef = float(state["coef"])


@component
class KLInLoss(_WeightedKL):
    """Add a KL term to the loss; rewards are unchanged.

        L_t = coef * estimate(log pi(y_t), log ref(y_t))

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4, with k3.
    Degenerate: coef 0 needs no reference and adds nothing. The mean gradient of k1 is zero on tokens of the current
    policy, so as a loss it only adds noise.

    Metrics: `kl/reference_nats`, mean of the estimate over the tokens of the batch, before the update.

    Args:
        coef: loss per nat, at least 0.
        estimator: k1, k2 or k3, see verl.ops.logprobs.
    Raises:
        ConfigError: coef below 0 or not finite.
    """

    estimator: Estimator = "k3"

    def shape_rewards(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        scores, metrics = super().shape_rewards(batch)
        if self.needs_reference and "old_log_probs" in batch:
            mask = batch["response_mask"]
            kl = _estimate(self.estimator, batch["old_log_probs"], batch["ref_log_probs"], mask)
            metrics = {"kl/reference_nats": masked_mean(kl, mask).item()}
        return scores, metrics

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor | None:
        kl = self.measure(log_probs, batch)
        return None if kl is None else self.coef * kl

    def measure(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor | None:
        if not self.needs_reference:
            return None
        return _estimate(self.estimator, log_probs, batch["ref_log_probs"], batch["response_mask"])


def _estimate(estimator: Estimator, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, T] nats, 0 and without gradient off the mask."""
    masked, kept_ref = torch.where(mask, log_probs, 0.0), torch.where(mask, ref_log_probs, 0.0)
    return ESTIMATORS[estimator](masked, kept_ref)
