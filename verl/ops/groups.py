"""Numbers compared within groups of rows, in which equal numbers differ by exactly zero."""

from __future__ import annotations

import torch
from torch import Tensor


def centred_in_groups(x: Tensor, group_ids: Tensor, weights: Tensor) -> Tensor:
    """Each number less the weighted mean of its group.

        x_i - sum_j w_j x_j / sum_j w_j      over the rows j of the group of i

    Degenerate: a group of one, or of equal numbers, gives exact zeros; rows of weight 0 give 0 and count nowhere.

    Args:
        x: [B] floats.
        group_ids: [B] int64, any labels in any order.
        weights: [B], at least 0.
    Returns:
        [B] of the dtype of x.
    """
    labels, group = torch.unique(group_ids, return_inverse=True)
    zeros, is_member = x.new_zeros(len(labels)), weights > 0
    # Measured from the lowest of the group, equal numbers are exactly 0 and so is their mean.
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
