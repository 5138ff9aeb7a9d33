"""Loss aggregation: from losses per token to a scalar that does not depend on the split into micro-batches.

A mean of micro-batch means depends on the split. Here the sum of each micro-batch is divided by the totals of the whole
batch, so that the shares of all micro-batches and processes add up to the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from verl.ops.masking import masked_mean, masked_sum

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


@dataclass(frozen=True)
class LossTotals:
    """Denominators of the loss, counted over the whole batch of an optimizer step.

    Attributes:
        tokens: True entries of the mask.
        sequences: rows with at least one True, or episodes if an episode may have several rows.
    """

    tokens: float
    sequences: float

    @classmethod
    def of(cls, mask: Tensor, episode_tokens: Tensor | None = None) -> LossTotals:
        """Count a [B, T] bool mask.

        Args:
            mask: response_mask.
            episode_tokens: [B], tokens of the whole episode of a row; None if each row is an episode.
        """
        if episode_tokens is None:
            return cls(tokens=float(mask.sum()), sequences=float(mask.any(dim=-1).sum()))
        counts = mask.sum(dim=-1).double()
        return cls(tokens=float(counts.sum()), sequences=float((counts / episode_tokens.clamp(min=1)).sum()))


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    mode: str,
    totals: LossTotals,
    norm_length: float | None = None,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """The share of these rows in the loss of the batch that `totals` counts.

        token-mean                sum over tokens / all tokens
        seq-mean-token-mean       sum over rows of the row's mean / all sequences
        seq-mean-token-sum        sum over tokens / all sequences
        seq-mean-token-sum-norm   sum over tokens / (all sequences * norm_length)

    Source of the last: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO): a constant, so that length biases nothing.

    The shares of all micro-batches add up to the loss of the batch, up to rounding.
    Degenerate: rows with an empty mask add nothing and are not counted; without rows it is 0.

    Args:
        per_token: [B, T].
        mask: [B, T] bool.
        mode: one of AGGREGATIONS.
        totals: of the whole batch, not of these rows.
        norm_length: divisor in tokens of seq-mean-token-sum-norm, above 0; unused by the other modes.
        episode_tokens: [B], tokens of the whole episode of a row, if an episode may have several rows.
    Returns:
        A scalar with gradient.
    Raises:
        ValueError: unknown mode, or norm_length missing.
    """
    if mode == "token-mean":
        return masked_sum(per_token, mask) / max(totals.tokens, 1.0)
    if mode == "seq-mean-token-mean" and episode_tokens is not None:
        return (masked_sum(per_token, mask, dim=-1) / episode_tokens.clamp(min=1)).sum() / max(totals.sequences, 1.0)
    if mode == "seq-mean-token-mean":
        return masked_mean(per_token, mask, dim=-1).sum() / max(totals.sequences, 1.0)
    if mode == "seq-mean-token-sum":
        return masked_sum(per_token, mask) / max(totals.sequences, 1.0)
    if mode == "seq-mean-token-sum-norm":
        if norm_length is None or not norm_length > 0:
            raise ValueError(f"norm_length is {norm_length}: {mode} needs a number of tokens above 0.")
        return masked_sum(per_token, mask) / (max(totals.sequences, 1.0) * norm_length)
    raise ValueError(f"aggregation is {mode!r}: must be one of {', '.join(AGGREGATIONS)}.")
