"""Sums, means and whitening over the True entries of a mask, means within groups of rows, and loss aggregation.

Values off the mask, including NaN, never affect a result. Dtypes are kept. Equal values in a group differ from their
mean by exactly zero.

Loss aggregation goes from losses per token to a scalar that does not depend on the split into micro-batches. A mean of
micro-batch means depends on it. Here the sum of each micro-batch is divided by the totals of the whole batch, so that
the shares of all micro-batches and processes add up to the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where `mask` is True, over `dim` or over all dims; 0 if the mask is empty.

    Args:
        x: any shape.
        mask: bool, the same shape.
        dim: the dim to sum over; None sums all of them to a scalar.
    """
    masked = torch.where(mask, x, x.new_zeros(()))
    return masked.sum() if dim is None else masked.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask` is True, over `dim` or over all dims; 0 if the mask is empty.

    Shapes as in `masked_sum`.
    """
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale `x` to mean 0 and variance 1 over the True entries of `mask`; 0 off the mask.

        (x - mean) / sqrt(variance + epsilon), the variance divided by n

    Degenerate: a single entry, or entries that are all equal, give exact zeros; an empty mask gives zeros.

    Args:
        x: any shape.
        mask: bool, the same shape.
        epsilon: prevents rounding errors from being scaled up to size 1.
    """
    # Relative to the smallest entry, equal entries are exactly 0 and so is their mean.
    lowest = torch.where(mask, x, torch.inf).amin() if x.numel() else x.new_zeros(())
    shifted = torch.where(mask, x - lowest, x.new_zeros(()))
    centred = torch.where(mask, shifted - masked_mean(shifted, mask), x.new_zeros(()))
    variance = masked_mean(centred.double().square(), mask)  # large squares overflow float32
    return (centred * torch.rsqrt(variance + epsilon)).to(x.dtype)


def last_true(mask: Tensor) -> Tensor:
    """Index of the last True of each row, -1 for a row without one.

    Args:
        mask: [B, T] bool.
    Returns:
        [B] int64.
    """
    positions = torch.arange(mask.shape[-1], device=mask.device)
    before_first = torch.full((*mask.shape[:-1], 1), -1, dtype=torch.int64, device=mask.device)
    return torch.cat([before_first, torch.where(mask, positions, -1)], dim=-1).amax(dim=-1)


def centred_in_groups(x: Tensor, group_ids: Tensor, weights: Tensor) -> Tensor:
    """Each number less the weighted mean of its group.

        x_i - sum_j w_j x_j / sum_j w_j      over the rows j of the group of i

    Degenerate: a group of one, or of equal numbers, gives exact zeros; rows of weight 0 give 0 and do not count.

    Args:
        x: [B] floats.
        group_ids: [B] int64, any labels in any order.
        weights: [B], at least 0.
    Returns:
        [B] of the dtype of x.
    """
    labels, group = torch.unique(group_ids, return_inverse=True)
    zeros, is_member = x.new_zeros(len(labels)), weights > 0
    # Relative to the minimum of the group, equal values are exactly 0 and so is their mean.
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, group, x.masked_fill(~is_member, torch.inf), "amin")
    shifted = torch.where(is_member, x - lowest[group], 0.0)
    weights = weights.to(x.dtype)
    total = zeros.index_add(0, group, weights)
    mean = zeros.index_add(0, group, weights * shifted) / torch.where(total > 0, total, 1.0)
    return torch.where(is_member, shifted - mean[group], 0.0)


def group_sums(x: Tensor, group_ids: Tensor) -> Tensor:
    """[B]: for each row the sum of x [B] over its group."""
    labels, group = torch.unique(group_ids, return_inverse=True)
    return x.new_zeros(len(labels)).index_add(0, group, x)[group]


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
