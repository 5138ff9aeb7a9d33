"""How rows of different length are cut into micro-batches and divided among processes."""

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
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}: a micro-batch holds at least one token.")
    sizes = _as_list(lengths)
    batches: list[list[int]] = []
    longest = 0
    for row in _longest_first(sizes):
        if not batches or (len(batches[-1]) + 1) * longest > token_budget:
            batches.append([])
            longest = sizes[row]
        batches[-1].append(row)
    return [torch.tensor(rows, dtype=torch.int64) for rows in batches]


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
        lightest_first = sorted(range(parts), key=lambda part: totals[part])
        for part, row in zip(lightest_first, order[start : start + parts], strict=False):
            totals[part] += sizes[row]
            rows_of[part].append(row)
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in rows_of]


def _as_list(lengths: Sequence[int] | Tensor) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _longest_first(sizes: list[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda row: -sizes[row])
