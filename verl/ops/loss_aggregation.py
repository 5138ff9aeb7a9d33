"""Loss aggregation: from losses per token to one scalar that does not depend on how the batch is cut into
micro-batches.

A mean over micro-batch means depends on the cut. Here each piece is divided by the totals of the whole batch, so the
pieces simply add up, over micro-batches and over processes alike.
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
    """What a loss is divided by, counted over the whole batch that one optimizer step sees.

    Attributes:
        tokens: True entries of the mask.
        sequences: rows of the mask with at least one, or episodes, where one may have several rows.
    """

    tokens: float
    sequences: float

    @classmethod
    def of(cls, mask: Tensor, episode_tokens: Tensor | None = None) -> LossTotals:
        """Count a [B, T] bool mask.

        Args:
            episode_tokens: [B] of the whole episode that a row is part of; None where each row is one.
        """
        if episode_tokens is None:
            return cls(tokens=float(mask.sum()), sequences=float(mask.any(dim=-1).sum()))
        own = mask.sum(dim=-1).double()
        return cls(tokens=float(own.sum()), sequences=float((own / episode_tokens.clamp(min=1)).sum()))


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

    Adding up the shares of all pieces of a batch gives the loss of the whole, up to rounding.
    Degenerate: rows with an empty mask add nothing and are not counted; no rows at all give 0.

    Args:
        per_token: [B, T].
        mask: [B, T] bool.
        mode: one of AGGREGATIONS.
        totals: of the whole batch, not of these rows.
        episode_tokens: [B], where a sequence is an episode of several rows: the tokens of all of them.
        norm_length: tokens that a sequence counts for in seq-mean-token-sum-norm, above 0; the others take none.
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
