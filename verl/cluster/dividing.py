"""A batch divided among processes, balanced by tokens, and the answers joined in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.ops.batching import balance
from verl.protocol import DataProto


class Division:
    """Which rows went to which process.

    Args:
        batch: rows with `attention_mask` [B S], or prompts with `prompt_mask` [B P]; weighed by the tokens in it.
        parts: number of processes; with fewer rows than that, some get none.
    """

    def __init__(self, batch: DataProto, parts: int):
        self.rows: list[Tensor] = balance(_lengths(batch), parts)

    def divide(self, batch: DataProto) -> list[DataProto]:
        return [batch[rows] for rows in self.rows]

    def join(self, answers: Sequence[DataProto], empty: Callable[..., Tensor] | None = None) -> DataProto:
        """Answers of the processes, as if one process had answered.

        A process may answer each row with several (samples of a prompt), the same number everywhere, side by side.

        Args:
            empty: memory for the fields of the whole, by shape and dtype; None for new memory.
        """
        given = [(rows, answer) for rows, answer in zip(self.rows, answers, strict=True) if len(rows)]
        if not given:
            return answers[0]
        each = len(given[0][1]) // len(given[0][0])
        places = [(rows[:, None] * each + torch.arange(each)).flatten() for rows, _ in given]
        return DataProto.concat([answer for _, answer in given], places, empty)


def _lengths(batch: Any) -> Tensor:
    for name in ("attention_mask", "prompt_mask"):
        if name in batch.batch:
            return batch.batch[name].sum(dim=1)
    return torch.ones(len(batch), dtype=torch.int64)
