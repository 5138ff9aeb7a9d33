"""Cutting rows of different length into micro-batches, and balancing them over processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def micro_batches(lengths: Sequence[int] | Tensor, token_budget: int) -> list[Tensor]:
    """Cut rows, longest first, so that rows * longest stays within a budget of padded tokens.

    Rows of equal length keep their order. A single row over the budget is a micro-batch of its own. No rows give
    an empty list. Every row is in exactly one micro-batch.

    Args:
        lengths: tokens per row.
        token_budget: padded tokens per micro-batch, at least 1.
    Returns:
        Row indices, int64, one tensor per micro-batch.
    Raises:
        ValueError: budget below 1.
    """
    _check_budget(token_budget)
    sizes = _as_list(lengths)
    batches: list[list[int]] = []
    longest = 0
    for row in _longest_first(sizes):
        if not batches or (len(batches[-1]) + 1) * longest > token_budget:
            batches.append([])
            longest = sizes[row]
        batches[-1].append(row)
    return [torch.tensor(rows, dtype=torch.int64) for rows in batches]


def micro_batches_of_groups(own: Tensor, shared: Tensor, group_of: Tensor, token_budget: int) -> list[Tensor]:
    """Cut rows by a budget of tokens, where what the rows of a group share counts once in each micro-batch.

    Groups stay together unless one alone exceeds the budget; they come by their longest row, longest first, and so do
    the rows of each. A single row over the budget is a micro-batch of its own.

    Args:
        own, shared: [b] tokens of each row, and tokens that it shares with its group.
        group_of: [b].
        token_budget: tokens of a micro-batch, at least 1.
    Returns:
        Row indices, int64, one tensor per micro-batch.
    Raises:
        ValueError: budget below 1.
    """
    _check_budget(token_budget)
    groups: dict[int, list[int]] = {}
    sizes, shares, group = own.tolist(), shared.tolist(), group_of.tolist()
    for row in _longest_first(sizes):
        groups.setdefault(group[row], []).append(row)
    batches: list[list[int]] = []
    used, present = token_budget, -1
    for number, rows in groups.items():
        if used + shares[rows[0]] + sum(sizes[row] for row in rows) > token_budget:
            used = token_budget  # what is left of the last one is too small: begin a new one
        for row in rows:
            cost = sizes[row] + (0 if present == number else shares[row])
            if not batches or used + cost > token_budget:
                batches.append([])
                used, cost = 0, sizes[row] + shares[row]
            batches[-1].append(row)
            used, present = used + cost, number
    return [torch.tensor(rows, dtype=torch.int64) for rows in batches]


def _check_budget(token_budget: int) -> None:
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}: a micro-batch holds at least one token.")


def balance(lengths: Sequence[int] | Tensor, parts: int) -> list[Tensor]:
    """Divide rows into parts of nearly equal total length, with counts that differ by at most one.

    Rows are dealt longest first in rounds of one per part, the longest of a round to the part that has least so far.
    Hence the totals of two parts never differ by more than the longest row. Deterministic.

    Degenerate: with fewer rows than parts, each row is alone and the other parts are empty.

    Args:
        lengths: tokens per row.
        parts: at least 1.
    Returns:
        `parts` tensors of row indices, int64, each ascending.
    Raises:
        ValueError: parts below 1.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}: rows are divided among at least one.")
    sizes = _as_list(lengths)
    order = _longest_first(sizes)
    totals = [0] * parts
    rows_of: list[list[int]] = [[] for _ in range(parts)]
    for start in range(0, len(order), parts):
        lightest_first = sorted(range(parts), key=totals.__getitem__)
        for part, row in zip(lightest_first, order[start : start + parts], strict=False):
            totals[part] += sizes[row]
            rows_of[part].append(row)
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in rows_of]


def _as_list(lengths: Sequence[int] | Tensor) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _longest_first(sizes: list[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda row: -sizes[row])
