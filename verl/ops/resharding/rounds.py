"""The rounds of a plan: which slices are transferred at the same time, in bounded memory and without idle ranks.

plan ── windows of tensors ── rounds, each with a like part of every slice of the window ──> exchanges

The time of a round is that of the rank which sends or receives most in it, so a plan takes the least time if every
round has the same share of the work of the busiest rank: slices that are too large for one round are cut into as many
parts as there are rounds, for all ranks at once, and tensors of different pipeline stages take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from verl.ops.resharding.layout import Box

SLACK = 1.02  # a tensor joins a window if the busiest rank has hardly more to do than without it
ROUNDS_OF_STAGES = 16  # of a window where stages take turns: their tensors differ in size
TRIES = 12  # to find a number of rounds whose parts, of whole rows, keep to the limit


@dataclass(frozen=True)
class Move:
    """A slice that travels, in coordinates of the whole tensor."""

    name: str
    box: Box
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)
class MoveTable:
    """Moves as columns, ordered by tensor; one row each.

    Attributes:
        names: of the tensors of the target, which `tensor` counts.
        slices: that travel, which `box` counts.
    """

    names: tuple[str, ...]
    slices: tuple[Box, ...]
    tensor: np.ndarray
    box: np.ndarray
    source: np.ndarray
    target: np.ndarray
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    def rows_of(self, tensors: np.ndarray) -> np.ndarray:
        """The rows of some tensors, in order."""
        first, last = (np.searchsorted(self.tensor, tensors, side) for side in ("left", "right"))
        spans = [np.arange(a, b) for a, b in zip(first, last, strict=True)]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def moves(self, rows: np.ndarray) -> list[Move]:
        """Some rows as objects."""
        columns = (self.tensor, self.box, self.source, self.target, self.num_bytes)
        return [
            Move(self.names[tensor], self.slices[box], source, target, num_bytes)
            for tensor, box, source, target, num_bytes in zip(*(x[rows].tolist() for x in columns), strict=True)
        ]


@dataclass(frozen=True)
class Window:
    """Tensors whose slices travel together, in one round or several.

    Attributes:
        tensors: their numbers in the plan's table.
        num_rounds: into which each slice is cut; 0 where `exact` has the rounds.
        exact: the rounds, where slices have too few rows for equal parts.
    """

    table: MoveTable
    tensors: np.ndarray
    num_rounds: int
    exact: tuple[list[Move], ...] = ()

    @property
    def names(self) -> list[str]:
        return [self.table.names[number] for number in self.tensors.tolist()]

    def rounds(self, rank: int | None = None) -> Iterator[list[Move]]:
        """The moves of each round, or those in which a rank takes part, possibly none in a round."""
        for moves in self.exact:
            yield [move for move in moves if rank is None or rank in (move.source, move.target)]
        if not self.num_rounds:
            return
        rows = self.table.rows_of(self.tensors)
        if rank is not None:
            rows = rows[(self.table.source[rows] == rank) | (self.table.target[rows] == rank)]
        moves = self.table.moves(rows)
        for number in range(self.num_rounds):
            yield moves if self.num_rounds == 1 else list(_moves_of_round(moves, number, self.num_rounds))


def windows(
    table: MoveTable, stages: Sequence[tuple[int | None, int | None]], ranks: int, limit_bytes: int
) -> Iterator[Window]:
    """The windows of a plan, one after the other: in no round does a rank send or receive more than `limit_bytes`.

    They follow the order of the table's tensors; where stages of a pipeline hold them, stages take turns.

    Args:
        stages: of each tensor, that which has it and that which wants it, or None.
    Raises:
        ValueError: one element is larger than the limit.
    """
    sent, received = (_per_tensor(table, ends, ranks) for ends in (table.source, table.target))
    alone = np.maximum(sent.max(axis=1, initial=0), received.max(axis=1, initial=0))
    has_stages = len(set(stages)) > 1
    fitting = limit_bytes * (ROUNDS_OF_STAGES if has_stages else 1)
    now: list[int] = []
    load, busiest = np.zeros((2, ranks)), 0.0
    for number in _order(stages, alone):
        together = load + np.stack([sent[number], received[number]])
        if now and together.max() > max(fitting, SLACK * max(busiest, alone[number])):
            yield _window(table, np.array(now), busiest, limit_bytes)
            now, together = [], np.stack([sent[number], received[number]])
        now.append(number)
        load, busiest = together, float(together.max())
    if now:
        yield _window(table, np.array(now), busiest, limit_bytes)


def _order(stages: Sequence[tuple[int | None, int | None]], alone: np.ndarray) -> list[int]:
    """Numbers of the tensors: as they are, or in turns over the stages, each at the same share of its bytes."""
    if len(set(stages)) == 1:
        return list(range(len(stages)))
    total: Counter[tuple[int | None, int | None]] = Counter()
    for stage, num_bytes in zip(stages, alone.tolist(), strict=True):
        total[stage] += num_bytes
    so_far, shares = Counter(), []
    for stage, num_bytes in zip(stages, alone.tolist(), strict=True):
        shares.append((so_far[stage] + num_bytes / 2) / max(total[stage], 1))
        so_far[stage] += num_bytes
    return np.argsort(np.array(shares), kind="stable").tolist()


def _per_tensor(table: MoveTable, ends: np.ndarray, ranks: int) -> np.ndarray:
    """Bytes of each tensor at each rank."""
    count = len(table.names)
    return np.bincount(table.tensor * ranks + ends, table.num_bytes, count * ranks).reshape(count, ranks)


def _window(table: MoveTable, tensors: np.ndarray, busiest: float, limit_bytes: int) -> Window:
    if busiest <= limit_bytes:
        return Window(table, tensors, 1)
    rows = table.rows_of(tensors)
    used, index = np.unique(table.box[rows], return_inverse=True)
    num_rounds = -(-int(busiest) // limit_bytes)
    for _ in range(TRIES):
        largest = np.array([_largest_part(table.slices[box], num_rounds) for box in used.tolist()])[index]
        parts = table.num_bytes[rows] * largest
        if max(np.bincount(ends[rows], parts).max() for ends in (table.source, table.target)) <= limit_bytes:
            return Window(table, tensors, num_rounds)
        num_rounds += max(1, num_rounds // 8)
    return Window(table, tensors, 0, tuple(_exact(table.moves(rows), limit_bytes)))


def _exact(moves: list[Move], limit_bytes: int) -> Iterator[list[Move]]:
    """Rounds of moves whose slices have few rows: each part goes into the first round that has room for it."""
    rounds: list[tuple[list[Move], Counter[tuple[str, int]]]] = []
    for move in moves:
        for part in _cut(move, limit_bytes):
            ends = (("from", part.source), ("to", part.target))
            fitting = ((x, used) for x, used in rounds if all(used[e] + part.num_bytes <= limit_bytes for e in ends))
            if (size := next(fitting, None)) is None:
                rounds.append(size := ([], Counter()))
            chosen, used = size
            chosen.append(part)
            for end in ends:
                used[end] += part.num_bytes
    yield from (chosen for chosen, _ in rounds)


def _cut(move: Move, limit_bytes: int) -> Iterator[Move]:
    """A move as parts of at most `limit_bytes`, cut along its first axis that is longer than 1."""
    if move.num_bytes <= limit_bytes:
        yield move
        return
    axis = next((i for i, (start, stop) in enumerate(move.box) if stop - start > 1), None)
    if axis is None:
        raise ValueError(f"{move.name}: one element takes {move.num_bytes} bytes, the limit is {limit_bytes}.")
    start, stop = move.box[axis]
    row = move.num_bytes // (stop - start)
    step = max(1, limit_bytes // row)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        box = (*move.box[:axis], (first, last), *move.box[axis + 1 :])
        yield from _cut(Move(move.name, box, move.source, move.target, row * (last - first)), limit_bytes)


def _moves_of_round(moves: list[Move], number: int, num_rounds: int) -> Iterator[Move]:
    """Part of each move that belongs to one of several rounds."""
    for move in moves:
        axis, first, last, length = part_of_round(move.box, number, num_rounds)
        if first < last:
            box = move.box
            if axis >= 0:
                start = box[axis][0]
                box = (*box[:axis], (start + first, start + last), *box[axis + 1 :])
            yield Move(move.name, box, move.source, move.target, move.num_bytes * (last - first) // length)


@lru_cache(maxsize=1 << 16)
def _cut_axis(box: Box, num_rounds: int) -> tuple[int, int]:
    """Axis along which a slice is cut, and its length there: its first axis with rows enough for nearly equal parts,
    or the longest; -1 for a scalar.
    """
    lengths = [stop - start for start, stop in box]
    fitting = (axis for axis, length in enumerate(lengths) if length >= 16 * num_rounds)
    axis = next(fitting, lengths.index(max(lengths)) if lengths else -1)
    return axis, lengths[axis] if lengths else 1


def part_of_round(box: Box, number: int, num_rounds: int) -> tuple[int, int, int, int]:
    """Axis of the cut; first and last row of one part, counted from the slice's first; rows of the slice."""
    axis, length = _cut_axis(box, num_rounds)
    return axis, length * number // num_rounds, length * (number + 1) // num_rounds, length


def _largest_part(box: Box, num_rounds: int) -> float:
    """The share of a slice that its largest part is."""
    length = _cut_axis(box, num_rounds)[1]
    return -(-length // num_rounds) / length
