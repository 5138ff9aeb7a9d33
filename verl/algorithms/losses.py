"""Policy and value losses, per token: from current log-probabilities or values and the batch.

`PPOClip`, `GSPO` and `CISPO` are policy losses; `ClippedValueLoss` is the critic's. A loss returns one value per
token; `verl.ops.masking` reduces them to a scalar.   B responses, T response length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from verl.component import Description, UnitInterval, component
from verl.ops.logprobs import k3
from verl.ops.masking import masked_mean

_MAX_LOG_RATIO = 20.0


@component
class PolicyLoss(Description):
    """Base class of policy losses.

    Attributes:
        function_form: the component that calls a function, for a node with `path` in place of a loss.
    """

    function_form: ClassVar[str] = "verl.algorithms.functions.LossFunction"

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, to be minimised.

        Args:
            log_probs: [B, T] nats, under the weights being updated; carries gradient.
            batch: [B, T] tensors: old_log_probs, advantages, response_mask.
        Returns:
            The loss [B, T], 0 off the mask, and stats, each [B, T], 0 off the mask and without gradient.
        """
        raise NotImplementedError


@component
class PPOClip(PolicyLoss):
    """The clipped surrogate of PPO.

        ratio = pi_new / pi_old
        L     = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        L     = min(L, -dual_clip * A)      where A < 0, if dual_clip is set

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025, arXiv:2503.14476, sec. 3.1;
    dual clip: Ye et al. 2019, arXiv:1912.09729.
    Differs: log(ratio) is clamped to +-20, so that the loss stays finite.
    Degenerate: off the mask the loss and its gradient are 0 for any values.

    Stats per token: `ratio`; `clip_fraction`, 1 where a clip is active, so that the gradient is 0;
    `approx_kl`, the k3 estimate of KL(old || new) in nats.

    Args:
        clip_low: lower clipping range, in [0, 1].
        clip_high: upper clipping range, at least 0.
        dual_clip: bound on the ratio for negative advantages, above 1; null for none.
    Raises:
        ConfigError: a bound outside its range.
    """

    clip_low: UnitInterval = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask, old_log_probs = batch["response_mask"], batch["old_log_probs"]
        advantages = torch.where(mask, batch["advantages"], 0.0)
        log_ratio = _log_ratio(log_probs, old_log_probs, mask)
        ratio = log_ratio.exp()
        free = -advantages * ratio
        held = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss, is_clipped = torch.maximum(free, held), held > free
        if self.dual_clip is not None:
            ceiling = torch.where(advantages < 0, -advantages * self.dual_clip, torch.inf)
            is_clipped = is_clipped | (loss > ceiling)
            loss = torch.minimum(loss, ceiling)
        return loss, _stats(ratio, is_clipped, log_ratio, mask)


@component
class GSPO(PolicyLoss):
    """The loss of GSPO: one clipped ratio per response.

        s_i  = (pi_new(y_i) / pi_old(y_i)) ^ (1 / length of y_i)
        s_it = sg[s_i] * pi_new(y_it) / sg[pi_new(y_it)]
        L_it = -min(s_it * A, clip(s_it, 1 - clip_low, 1 + clip_high) * A)

    s_it has the value of s_i, and its gradient flows through the probability of token t.

    Source: Zheng et al. 2025, arXiv:2507.18071, with the token form of its GSPO-token; sg is stop-gradient. The paper
    averages over the tokens of a response, then over responses: aggregation=seq-mean-token-mean.
    Differs: the mean of log(ratio) is clamped to +-20.
    Degenerate: for a response of one token it equals PPO. Off the mask the loss and its gradient are 0.

    Stats per token: `ratio`, s_i; `clip_fraction`, 1 on every token of a clipped response; `approx_kl`, the k3 estimate
    of KL(old || new) per token, from the ratios of the tokens.

    Args:
        clip_low, clip_high: clipping range of s_i. Since s_i is a mean over the response, it changes little: the paper
            uses 3e-4 and 4e-4.
    Raises:
        ConfigError: a bound outside its range.
    """

    clip_low: UnitInterval = 3e-4
    clip_high: NonNegativeFloat = 4e-4

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch["response_mask"]
        advantages = torch.where(mask, batch["advantages"], 0.0)
        difference = torch.where(mask, log_probs - batch["old_log_probs"], 0.0)
        mean = masked_mean(difference.detach(), mask, dim=-1).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratio = (mean.unsqueeze(-1) + difference - difference.detach()).exp()
        free = -advantages * ratio
        held = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        log_ratio = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return torch.maximum(free, held), _stats(ratio, held > free, log_ratio, mask)


@component
class CISPO(PolicyLoss):
    """The loss of CISPO: REINFORCE with a clipped importance weight without gradient.

        L_t = -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log pi_new(y_t)

    Unlike in PPO, clipping removes no token's gradient; it only bounds the weight.

    Source: MiniMax 2025, arXiv:2506.13585, averaged over all tokens: aggregation=token-mean. The paper
    leaves the weight unbounded below (clip_low 1) and gives no number for clip_high.
    Differs: log(ratio) is clamped to +-20.
    Degenerate: at pi_new = pi_old the gradient is the policy gradient. Off the mask the loss and its gradient are 0.

    Stats per token: as of PPOClip, but `clip_fraction` is 1 where the weight was clipped, which keeps its gradient.

    Args:
        clip_low: how far the weight may fall below 1, in [0, 1]; 1 is not a bound.
        clip_high: how far it may rise above 1, at least 0.
    Raises:
        ConfigError: a bound outside its range.
    """

    clip_low: UnitInterval = 1.0
    clip_high: NonNegativeFloat = 4.0

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch["response_mask"]
        advantages = torch.where(mask, batch["advantages"], 0.0)
        log_ratio = _log_ratio(log_probs, batch["old_log_probs"], mask)
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * advantages * torch.where(mask, log_probs, 0.0)
        return loss, _stats(ratio, weight != ratio, log_ratio, mask)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, log_probs - old_log_probs, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _stats(ratio: Tensor, is_clipped: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": torch.where(mask, ratio.detach(), 0.0),
        "clip_fraction": is_clipped.to(ratio.dtype),
        "approx_kl": k3(torch.zeros_like(ratio), log_ratio.detach()),
    }


@component
class ValueLoss(Description):
    """Base class of value losses."""

    def __call__(self, values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, to be minimised.

        Args:
            values: [B, T], of the critic being updated; carries gradient.
            batch: [B, T] tensors: values (those the returns were made with), returns, response_mask.
        Returns:
            The loss [B, T], 0 off the mask, and stats, each [B, T], 0 off the mask and without gradient.
        """
        raise NotImplementedError


@component
class ClippedValueLoss(ValueLoss):
    """Half the squared error, the larger one of V and of V clipped around its old value.

        V_held = V_old + clip(V - V_old, -clip, clip)
        L      = max((V - R)^2, (V_held - R)^2) / 2

    Source: the value loss of the PPO2 code that goes with Schulman et al. 2017, arXiv:1707.06347, not of the paper.
    Degenerate: off the mask the loss and its gradient are 0 for any values.

    Stats per token: `clip_fraction`, 1 where the clipped error is the larger one, so that the gradient is 0; `error`,
    V - R with its sign.

    Args:
        clip: clipping range around the old value, in units of reward, above 0; null for the plain squared error.
    Raises:
        ConfigError: clip not above 0.
    """

    clip: PositiveFloat | None = 0.2

    def __call__(self, values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask, old_values, returns = batch["response_mask"], batch["values"], batch["returns"]
        error = torch.where(mask, values - returns, 0.0)
        squared = error.square()
        is_clipped = torch.zeros_like(mask)
        if self.clip is not None:
            moved = values - old_values
            held = old_values + moved.clamp(-self.clip, self.clip)
            held_squared = torch.where(mask, held - returns, 0.0).square()
            is_clipped = (moved.abs() > self.clip) & (held_squared > squared)  # V_old + (V - V_old) may round above V
            squared = torch.maximum(squared, held_squared)
        stats = {"clip_fraction": is_clipped.to(squared.dtype), "error": error.detach()}
        return 0.5 * squared, stats
