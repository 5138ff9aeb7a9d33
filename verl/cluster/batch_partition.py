"""A batch partitioned among processes, balanced by tokens, and replies joined in row order through shared memory.

    driver ──call, which rows, OutputLayout──> rank 0, rank 1     shared memory for the whole result
           <─────WrittenOutput, WrittenOutput──                    every row written in its place: nothing is copied

The shapes of a result are predicted from the last result of the same call. Where they turn out otherwise, the driver
joins the parts, and allocates no shared output for that call any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.cluster.shm_channel import ALIGNMENT
from verl.ops.batching import balance
from verl.protocol import DataProto
from verl.protocol.concat import set_rows
from verl.protocol.fields import FIELDS
from verl.protocol.serialization import taken


class BatchPartition:
    """Which rows went to which process.

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

        A process may answer each row with several (samples of a prompt), the same number everywhere, side by side.

        Args:
            empty: memory for the fields of the whole, by shape and dtype; None for new memory.
        """
        given = [(rows, answer) for rows, answer in zip(self.rows, answers, strict=True) if len(rows)]
        if not given:
            return answers[0]
        each = len(given[0][1]) // len(given[0][0])
        places = [answer_rows(rows, each) for rows, _ in given]
        return DataProto.concat([answer for _, answer in given], places, empty)


def answer_rows(rows: Tensor, each: int) -> Tensor:
    """Which rows of a whole answer belong to some rows of a batch, where each is answered with so many."""
    return (rows[:, None] * each + torch.arange(each)).flatten()


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


SMALL = 2**16  # bytes: answers below it are joined by the driver


@dataclass(frozen=True)
class OutputLayout:
    """How the fields of a whole answer lie one behind the other.

    Attributes:
        each: rows of the answer to a row of the batch.
        columns: name, dtype and shape of each field.
    """

    each: int
    columns: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return max((end for _, end in self._spans()), default=0)

    def fields(self, memory: np.ndarray) -> dict[str, Tensor]:
        """The fields, on memory of at least `size` bytes."""
        return {
            name: torch.frombuffer(memory[start:end], dtype=dtype).view(shape)
            for (name, dtype, shape), (start, end) in zip(self.columns, self._spans(), strict=True)
        }

    def fits(self, answer: DataProto, rows: int) -> bool:
        """Whether an answer to so many rows of the batch is a part of it."""
        found = {name: (x.dtype, x.shape[1:]) for name, x in answer.batch.items()}
        expected = {name: (dtype, shape[1:]) for name, dtype, shape in self.columns}
        return found == expected and len(answer) == rows * self.each

    def _spans(self) -> Iterator[tuple[int, int]]:
        end = 0
        for _, dtype, shape in self.columns:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + dtype.itemsize * int(np.prod(shape))
            yield start, end


class WrittenOutput(NamedTuple):
    """An answer whose tensors are in their places, and the rest of it: columns, facts, and who made each field."""

    rest: DataProto


def write_output(answer: Any, rows: Tensor, layout: OutputLayout, memory: np.ndarray) -> Any:
    """Write the tensors of a process's answer into the shared memory, if they are what was expected.

    Args:
        rows: of the batch, those that this process was given.
    Returns:
        `WrittenOutput`; the answer itself, unchanged, if it is not what was expected.
    """
    if type(answer) is not DataProto or not layout.fits(answer, len(rows)):
        return answer
    places = answer_rows(rows, layout.each)
    for name, whole in layout.fields(memory).items():
        set_rows(whole, places, answer[name].detach().to("cpu"))
    bound = {letter: size for letter, size in answer._bound.items() if letter == "B"}
    return WrittenOutput(DataProto()._fill({}, dict(answer.non_tensor_batch), answer.meta_info, answer._sources, bound))


class SharedOutput:
    """The driver's side of one call.

    Args:
        layout: of the answer.
        memory: gives it, held until nothing that lies on it is left.
    Attributes:
        was_used: the answer was what had been expected.
    """

    def __init__(self, layout: OutputLayout, memory: Callable[[], np.ndarray]):
        self._layout, self._memory, self.was_used = layout, memory, False

    def join(self, answers: Sequence[Any], division: BatchPartition, empty: Callable[..., Tensor]) -> DataProto:
        """The answers of all, each to its rows of the batch, as one."""
        fields = self._layout.fields(self._memory())
        given = [(answer, rows) for answer, rows in zip(answers, division.rows, strict=True) if len(rows)]
        self.was_used = bool(given) and all(type(answer) is WrittenOutput for answer, _ in given)
        if self.was_used:
            whole = division.join([answer.rest if type(answer) is WrittenOutput else answer for answer in answers])
            return _with_tensors(whole, fields, given[0][0].rest)
        return division.join([self._taken(*pair, fields) for pair in zip(answers, division.rows, strict=True)], empty)

    def _taken(self, answer: Any, rows: Tensor, fields: dict[str, Tensor]) -> DataProto:
        """The answer of one, as it would have travelled by itself."""
        if type(answer) is not WrittenOutput:
            return answer
        places = answer_rows(rows, self._layout.each)
        return _with_tensors(answer.rest, {name: taken(x, places) for name, x in fields.items()}, answer.rest)


class OutputShapes:
    """What the answers to each call look like, as far as that was seen."""

    def __init__(self):
        self._seen: dict[str, _OutputTemplate | None] = {}

    def layout(self, call: str, batch: DataProto) -> OutputLayout | None:
        """Of the answer to a call with such a batch; None where it is not known, or too little to matter."""
        template = self._seen.get(call)
        sizes = {letter: size for letter, (size, _) in batch._bound.items()}
        if template is None or not all(letter in sizes for letter in template.letters):
            return None
        columns = [
            (name, dtype, (len(batch) * template.each, *(sizes.get(dim, dim) for dim in dims)))  # type: ignore[arg-type]
            for name, dtype, dims in template.columns
        ]
        layout = OutputLayout(template.each, tuple(columns))
        return layout if layout.size >= SMALL and not any(0 in shape for _, _, shape in columns) else None

    def note(self, call: str, batch: DataProto, answer: DataProto) -> None:
        """Remember what an answer looked like that the driver joined; one unlike those before it tells nothing."""
        if not len(batch):
            return
        template = _template(batch, answer)
        self._seen[call] = template if self._seen.get(call, template) == template else None


class _OutputTemplate(NamedTuple):
    """The fields of an answer, with letters for the dims that it shares with its batch."""

    each: int
    columns: tuple[tuple[str, torch.dtype, tuple[str | int, ...]], ...]

    @property
    def letters(self) -> set[str]:
        return {dim for _, _, dims in self.columns for dim in dims if isinstance(dim, str)}


def _template(batch: DataProto, answer: DataProto) -> _OutputTemplate | None:
    """None where the answer has lengths of its own."""
    columns = []
    for name, x in answer.batch.items():
        letters = FIELDS[name].dims[1:] if name in FIELDS else ()
        if any(batch._bound.get(letter, (None,))[0] != size for letter, size in zip(letters, x.shape[1:])):
            return None
        columns.append((name, x.dtype, letters or tuple(x.shape[1:])))
    return _OutputTemplate(len(answer) // len(batch), tuple(columns))


def _with_tensors(rest: DataProto, tensors: dict[str, Tensor], maker: DataProto) -> DataProto:
    return DataProto()._fill(tensors, dict(rest.non_tensor_batch), rest.meta_info, maker._sources, {}).check()
