"""A batch partitioned among processes, balanced by tokens, and their replies joined in row order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.ops.batching import balance
from verl.protocol import DataProto


class BatchPartition:
    """Division of the rows of a batch among processes.

    Args:
        batch: rows with `attention_mask` [B S], or prompts with `prompt_mask` [B P]; weighed by the tokens in it, and
            by `expected_tokens` [B], if there are any.
        parts: number of processes; with fewer rows than that, some get none.
    """

    def __init__(self, batch: DataProto, parts: int):
        self.rows: list[Tensor] = _partition_cache.rows(batch, parts)

    def split_rows(self, batch: DataProto) -> list[DataProto]:
        return [batch[rows] for rows in self.rows]

    def join(self, answers: Sequence[DataProto], empty: Callable[..., Tensor] | None = None) -> DataProto:
        """Answers of the processes, as if one process had answered.

        A process may answer each row with several (samples of a prompt), the same number for all of its rows, side by
        side.

        Args:
            empty: memory for the fields of the whole, by shape and dtype; None for new memory.
        """
        answered = [(rows, answer) for rows, answer in zip(self.rows, answers, strict=True) if len(rows)]
        if not answered:
            return answers[0]
        each = [len(answer) // len(rows) for rows, answer in answered]
        counts = torch.zeros(sum(len(rows) for rows, _ in answered), dtype=torch.int64)
        for (rows, _), count in zip(answered, each, strict=True):
            counts[rows] = count
        places = [answer_rows(rows, counts, count) for (rows, _), count in zip(answered, each, strict=True)]
        return DataProto.concat([answer for _, answer in answered], places, empty)


def answer_rows(rows: Tensor, counts: Tensor, each: int) -> Tensor:
    """Indices, in a whole answer, of some rows of a batch.

    Args:
        counts: of answers, to each row of the batch; `each` to these.
    """
    starts = counts.cumsum(0) - counts
    return (starts[rows][:, None] + torch.arange(each)).flatten()


class _PartitionCache:
    """Divisions by the mask that came last: a step asks all of its roles about the same rows."""

    def __init__(self):
        self._seen: tuple[Any, int] = (lambda: None, 0)  # the mask, unless it is gone, and how often it was written
        self._rows: dict[int, list[Tensor]] = {}

    def rows(self, batch: Any, parts: int) -> list[Tensor]:
        mask = next((batch.batch[name] for name in ("attention_mask", "prompt_mask") if name in batch.batch), None)
        if mask is None:
            return balance(torch.ones(len(batch), dtype=torch.int64), parts)
        if "expected_tokens" in batch.batch:
            return balance(mask.sum(dim=1) + batch.batch["expected_tokens"], parts)
        if mask.is_inference():  # nobody counts how often it is written
            return balance(mask.sum(dim=1), parts)
        (last, written), known = self._seen, self._rows
        if last() is not mask or written != mask._version:
            known = {}
            self._seen, self._rows = (weakref.ref(mask), mask._version), known
        if parts not in known:
            known[parts] = balance(mask.sum(dim=1), parts)
        return known[parts]


_partition_cache = _PartitionCache()
