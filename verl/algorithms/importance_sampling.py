"""Truncated importance weights for tokens that were not sampled by the policy that is trained.

    TruncatedIS     w_t = min(pi_old(y_t) / pi_rollout(y_t), cap), where the engine samples in another precision, with
                    other kernels or with older weights than the trainer
    reuse_weights   the same for rows of the replay buffer; 1 for rows of this step unless `algorithm.correction` is set

pi_rollout sampled the row; pi_old is the policy before this step's update, which the clipped ratio of the loss starts
from.   B responses, T response length.

Source: Hilton et al. 2021, arXiv:2110.00641 (a proximal policy apart from the behaviour policy); Espeholt et al. 2018,
arXiv:1802.01561 (truncated weights).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl.component import Description, UnitInterval, component
from verl.ops.masking import masked_mean
from verl.protocol import DataProto

_MAX_LOG_WEIGHT = 20.0


@component
class TruncatedIS(Description):
    """Multiply each advantage by the ratio of the token's probability in the trainer to that in the rollout engine.

        log w_t = log pi_old(y_t) - log pi_rollout(y_t)           level token
        log w_t = sum of that over the response, for each t       level sequence
        truncate:  A_t <- min(w_t, cap) * A_t
        mask:      A_t <- w_t * A_t  where floor <= w_t <= cap, else 0

    Every policy loss here is proportional to the advantage, so this weights the loss and the gradient of each token.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (token, truncate);
    Ionides 2008, "Truncated importance sampling".
    Differs: log w is clamped to +-20. Masked tokens still count in the denominators of the loss.
    Degenerate: equal log-probs give weights of exactly 1. A row with an empty mask stays 0.

    Metrics: `importance/weight_mean` and `importance/weight_max` before truncation, over tokens;
    `importance/effective_share`, (sum w)^2 / (n sum w^2), the effective sample size as a fraction of the tokens;
    `importance/cut_share`, the fraction of tokens whose weight was truncated or masked.

    Args:
        level: a weight per token, or one per response, which is unbiased, but has a much higher variance.
        mode: `truncate` weights to the cap, or `mask` tokens with weights outside of [floor, cap].
        cap: the largest weight, at least 1.
        floor: the smallest weight that is not masked, in [0, 1]; must be 0 with truncate.
    Raises:
        ConfigError: a bound outside its range, or a floor with truncate.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: Annotated[float, Field(ge=1)] = 2.0
    floor: UnitInterval = 0.0

    def faults(self) -> Iterator[str]:
        if self.floor and self.mode == "truncate":
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
        bounded = weights.clamp(max=self.cap) if self.mode == "truncate" else weights.masked_fill(is_cut, 0.0)
        mean, square = (float(masked_mean(weights.double() ** power, mask)) for power in (1, 2))
        metrics = {
            "importance/weight_mean": mean,
            "importance/weight_max": float(weights.max()) if weights.numel() else 0.0,
            "importance/effective_share": mean**2 / square if square else 0.0,
            "importance/cut_share": float(masked_mean(is_cut.double(), mask)),
        }
        return bounded, metrics


def weight_advantages(credit: DataProto, weights: Tensor) -> DataProto:
    """Multiply advantages by weights [B, T]. Returns, from which the critic learns, are unchanged."""
    advantages = credit["advantages"] * weights.to(credit["advantages"].dtype)
    return DataProto.from_dict({"advantages": advantages, "returns": credit["returns"]})


@torch.no_grad()
def reuse_weights(batch: DataProto, correction: TruncatedIS | None) -> tuple[Tensor | None, dict[str, float]]:
    """Importance weights of a batch with rows from the replay buffer, and metrics.

    Args:
        batch: rollout_log_probs, old_log_probs, response_mask, [B, T]; with rows of the buffer also `is_replayed`, [B].
        correction: for all rows; None for `TruncatedIS()` on rows of the buffer only.
    Returns:
        [B, T], or None if all weights are 1; and metrics.
    """
    is_old = batch.batch.get("is_replayed")
    if is_old is None or not bool(is_old.any()):
        return correction(batch) if correction is not None else (None, {})
    weights, metrics = (correction or TruncatedIS())(batch)
    if correction is None:
        weights = torch.where(is_old[:, None], weights, batch["response_mask"].to(weights.dtype))
        metrics = {}
    old = weights[is_old][batch["response_mask"][is_old]].double()
    if not old.numel():
        return weights, metrics
    return weights, metrics | {
        "replay/weight_mean": float(old.mean()),
        "replay/weight_max": float(old.max()),
        "replay/effective_share": float(old.sum() ** 2 / (len(old) * (old**2).sum()).clamp_min(1e-300)),
    }
