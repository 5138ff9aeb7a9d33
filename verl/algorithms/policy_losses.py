"""Policy losses: per token, from new log-probabilities and the batch they are compared with.

B responses, T response length. A loss returns one number per token; `verl.ops.aggregate` makes the scalar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.description import Description
from verl.ops.kl_estimators import k3

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Description):
    """Base of the policy losses."""

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, to be minimised.

        Args:
            log_probs: [B, T] nats, under the weights being updated; carries gradient.
            batch: [B, T] tensors: old_log_probs, advantages, response_mask, and whatever the loss declares.
        Returns:
            The loss [B, T], 0 off the mask, and stats, each [B, T], 0 off the mask and without gradient.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PPOClip(PolicyLoss):
    """The clipped surrogate of PPO.

        ratio = pi_new / pi_old
        L     = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        L     = min(L, -dual_clip * A)      where A < 0, if dual_clip is set

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025, arXiv:2503.14476, sec. 3.1;
    dual clip: Ye et al. 2019, arXiv:1912.09729.
    Differs: log(ratio) is held within +-20, so that no token makes the loss infinite.
    Degenerate: off the mask the loss and its gradient are 0, whatever stands there.

    Stats per token: `ratio`; `clip_fraction`, 1 where either clip decided the loss, so that no gradient flows;
    `approx_kl`, the k3 estimate of KL(old || new) in nats.

    Args:
        clip_low: how far the ratio may usefully fall below 1, in [0, 1].
        clip_high: how far it may usefully rise above 1, at least 0.
        dual_clip: bound on the ratio for negative advantages, above 1; None leaves it unbounded.
    Raises:
        ConfigError: a bound outside its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def faults(self) -> Iterator[str]:
        if not 0 <= self.clip_low <= 1:
            yield f"clip_low is {self.clip_low}: must lie in [0, 1]."
        if not (0 <= self.clip_high < math.inf):
            yield f"clip_high is {self.clip_high}: must be a finite number, at least 0."
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            yield f"dual_clip is {self.dual_clip}: must be a finite number above 1, or null."

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask, old_log_probs = batch["response_mask"], batch["old_log_probs"]
        advantages = torch.where(mask, batch["advantages"], 0.0)
        log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        free = -advantages * ratio
        held = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss, is_clipped = torch.maximum(free, held), held > free
        if self.dual_clip is not None:
            ceiling = torch.where(advantages < 0, -advantages * self.dual_clip, torch.inf)
            is_clipped = is_clipped | (loss > ceiling)
            loss = torch.minimum(loss, ceiling)
        stats = {
            "ratio": torch.where(mask, ratio.detach(), 0.0),
            "clip_fraction": is_clipped.to(loss.dtype),
            "approx_kl": k3(torch.zeros_like(ratio), log_ratio.detach()),
        }
        return loss, stats
