"""Rows of different length: split into micro-batches, and partitioned among processes, balanced by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.protocol import DataProto


def micro_batches(lengths: Sequence[int] | Tensor, token_budget: int) -> list[Tensor]:
    """Split rows, longest first, so that rows * longest stays within a budget of padded tokens.

    Rows of equal length keep their order. A single row over the budget is a separate micro-batch. Every row is in
    exactly one micro-batch; without rows the list is empty.

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
    """Split rows by a budget of tokens; tokens that a group shares count once per micro-batch.

    Groups stay together unless one exceeds the budget. Groups are sorted by their longest row, longest first, and so
    are the rows of each. A single row over the budget is a separate micro-batch.

    Args:
        own, shared: [b], tokens of each row alone, and tokens that it shares with its group.
        group_of: [b], index of the group.
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
            used = token_budget  # the rest of the last micro-batch is too small
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
        raise ValueError(f"token_budget is {token_budget}: must be at least 1.")


def balance(lengths: Sequence[int] | Tensor, parts: int) -> list[Tensor]:
    """Split rows into parts of nearly equal total length, with counts that differ by at most one.

    Rows are assigned longest first, in rounds of one row per part, the longest of a round to the part with the smallest
    total. The totals of two parts therefore differ by at most the longest row. Deterministic.

    Degenerate: with fewer rows than parts, some parts are empty.

    Args:
        lengths: tokens per row.
        parts: at least 1.
    Returns:
        `parts` tensors of row indices, int64, each ascending.
    Raises:
        ValueError: parts below 1.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}: must be at least 1.")
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


class BatchPartition:
    """Division of the rows of a batch among processes.

    Args:
        batch: rows with `attention_mask` [B S], or prompts with `prompt_mask` [B P]; weighed by the tokens in it.
        parts: number of processes; with fewer rows than that, some get none.
    """

    def __init__(self, batch: DataProto, parts: int):
        masks = (batch.batch[name] for name in ("attention_mask", "prompt_mask") if name in batch.batch)
        weights = next((mask.sum(dim=1) for mask in masks), torch.ones(len(batch), dtype=torch.int64))
        self.rows: list[Tensor] = balance(weights, parts)

    def split_rows(self, batch: DataProto) -> list[DataProto]:
        return [batch[rows] for rows in self.rows]

    def join(self, answers: Sequence[DataProto]) -> DataProto:
        """Answers of the processes, as if one process had answered.

        A process may answer each row with several (samples of a prompt), the same number for all of its rows, side by
        side.
        """
        answered = [(rows, answer) for rows, answer in zip(self.rows, answers, strict=True) if len(rows)]
        if not answered:
            return answers[0]
        each = [len(answer) // len(rows) for rows, answer in answered]
        counts = torch.zeros(sum(len(rows) for rows, _ in answered), dtype=torch.int64)
        for (rows, _), count in zip(answered, each, strict=True):
            counts[rows] = count
        indices = [answer_rows(rows, counts, count) for (rows, _), count in zip(answered, each, strict=True)]
        return DataProto.concat([answer for _, answer in answered], indices)


def answer_rows(rows: Tensor, counts: Tensor, each: int) -> Tensor:
    """Indices, in a whole answer, of some rows of a batch.

    Args:
        counts: of answers, to each row of the batch; `each` to these.
    """
    starts = counts.cumsum(0) - counts
    return (starts[rows][:, None] + torch.arange(each)).flatten()
