"""Truncated importance sampling: responses drawn by one set of numbers, trained on under another.

An engine that samples in another precision, with other kernels or with older weights draws from pi_rollout, while the
loss takes the tokens as drawn from pi_old.   B responses, T response length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl.component import Description
from verl.ops.masking import masked_mean
from verl.protocol import DataProto

_MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True, kw_only=True)
class TruncatedIS(Description):
    """Weigh each advantage by how much likelier the trainer finds the token than the engine that drew it.

        log w_t = log pi_old(y_t) - log pi_rollout(y_t)           level token
        log w_t = sum of that over the response, for each t       level sequence
        truncate:  A_t <- min(w_t, cap) * A_t
        mask:      A_t <- w_t * A_t  where floor <= w_t <= cap, else 0

    Every policy loss here is proportional to the advantage, so this weighs the loss and the gradient of each token.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (token, truncate);
    Ionides 2008, "Truncated importance sampling".
    Differs: log w is held within +-20. What is masked still counts in the denominators of the loss.
    Degenerate: equal log-probs give weights of exactly 1. A row with an empty mask is left as it is, at 0.

    Metrics: `importance/weight_mean` and `importance/weight_max` before the cut, over tokens;
    `importance/effective_share`, (sum w)^2 / (n sum w^2) of them, the effective sample size as a share of the tokens;
    `importance/cut_share`, the share of tokens whose weight was capped or masked.

    Args:
        level: a weight per token, or one for the whole response: unbiased, but of much higher variance.
        mode: truncate to the cap, or leave out what lies outside floor and cap.
        cap: the largest weight, at least 1.
        floor: the smallest weight that is not masked, in [0, 1]; 0 under truncate, which has none.
    Raises:
        ConfigError: a bound outside its range, or a floor that nothing would read.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: float = 2.0
    floor: float = 0.0

    def faults(self) -> Iterator[str]:
        if not 1 <= self.cap < math.inf:
            yield f"cap is {self.cap}: must be a finite number, at least 1."
        if not 0 <= self.floor <= 1:
            yield f"floor is {self.floor}: must lie in [0, 1]."
        elif self.floor and self.mode == "truncate":
            yield f"floor is {self.floor}: mode=truncate has no floor. Set it to 0, or mode=mask."

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        """The weights of a batch.

        Args:
            batch: rollout_log_probs, old_log_probs, response_mask, [B, T].
        Returns:
            [B, T], 0 off the mask, and metrics.
        """
        mask, old = batch["response_mask"], batch["old_log_probs"]
        log_weights = torch.where(mask, old - batch["rollout_log_probs"].to(old.dtype), 0.0)
        if self.level == "sequence":
            log_weights = log_weights.sum(dim=-1, keepdim=True).expand_as(log_weights)
        weights = torch.where(mask, log_weights.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp(), 0.0)
        is_cut = mask & ((weights > self.cap) | (weights < self.floor))
        kept = weights.clamp(max=self.cap) if self.mode == "truncate" else weights.masked_fill(is_cut, 0.0)
        mean, square = (float(masked_mean(weights.double() ** power, mask)) for power in (1, 2))
        metrics = {
            "importance/weight_mean": mean,
            "importance/weight_max": float(weights.max()) if weights.numel() else 0.0,
            "importance/effective_share": mean**2 / square if square else 0.0,
            "importance/cut_share": float(masked_mean(is_cut.double(), mask)),
        }
        return kept, metrics


def weighted(credit: DataProto, weights: Tensor) -> DataProto:
    """The credit with its advantages multiplied by weights [B, T]; returns stay, since the critic learns from them."""
    advantages = credit["advantages"] * weights.to(credit["advantages"].dtype)
    return DataProto.from_dict({"advantages": advantages, "returns": credit["returns"]})
