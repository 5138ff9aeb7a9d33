"""The plan from one layout to another: all transfers between ranks, computed once in advance.

training layout ──┐
                  ├── plan: (tensor, slice, from rank, to rank) ... ── carried out by `verl.ops.resharding.execute`
generation layout ┘

Tensors with equal layouts, such as those of repeated layers, are planned together. `rounds` schedules the transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from verl.ops.resharding.layout import Box, Layout, Mesh, TensorLayout, difference, volume
from verl.ops.resharding.rounds import MoveTable, Window, windows


@dataclass(frozen=True)
class Plan:
    """The transfers by which every rank gets its slices of the layout `target` from the layout `source`.

    Each missing element comes from exactly one rank, so that the volume is the least possible: `lower_bound`.
    """

    source: Layout
    target: Layout
    table: MoveTable = field(repr=False, compare=False)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes sent between ranks."""
        return int(self.table.num_bytes.sum())

    def windows(self, limit_bytes: int) -> Iterator[Window]:
        """The tensors, as their slices travel together; see `verl.ops.resharding.rounds.windows`."""
        stages = [(self.source.tensors[name].stage, self.target.tensors[name].stage) for name in self.table.names]
        return windows(self.table, stages, self.source.mesh.size, limit_bytes)

    def restricted(self, names: Sequence[str]) -> Plan:
        """The plan for some of the tensors, in the order of `names`."""
        source, target = (
            Layout(side.mesh, {name: side.tensors[name] for name in names}) for side in (self.source, self.target)
        )
        number = {name: index for index, name in enumerate(self.table.names)}
        of = np.array([number[name] for name in names], dtype=np.int64)
        rows = self.table.rows_of(of)
        again = np.zeros(len(number), dtype=np.int64)
        again[of] = np.arange(len(of))
        t = self.table
        columns = (again[t.tensor[rows]], t.box[rows], t.source[rows], t.target[rows], t.num_bytes[rows])
        return Plan(source, target, MoveTable(tuple(names), t.slices, *columns))


def reshard_plan(source: Layout, target: Layout) -> Plan:
    """Plan the transfers from one layout to another over the same ranks.

    Raises:
        ValueError: the layouts do not have the same tensors and ranks, or no rank holds a required slice.
    """
    _refuse_unequal(source, target)
    names, slices = tuple(target.tensors), _Slices()
    kinds: dict[tuple[TensorLayout, TensorLayout], list[int]] = {}
    for number, name in enumerate(names):
        kinds.setdefault((source.tensors[name], target.tensors[name]), []).append(number)
    fetches = [
        _Fetches.of(names[numbers[0]], *pair, source.mesh, target.mesh, np.array(numbers), slices)
        for pair, numbers in kinds.items()
    ]
    load = np.zeros(source.mesh.size, dtype=np.int64)
    for fetch in fetches:
        fetch.add_forced(load)
    columns = [fetch.rows(load) for fetch in fetches] or [tuple(np.zeros(0, dtype=np.int64) for _ in range(5))]
    tensor, box, sender, receiver, num_bytes = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(tensor, kind="stable")
    table = MoveTable(
        names, tuple(slices.found), tensor[order], box[order], sender[order], receiver[order], num_bytes[order]
    )
    return Plan(source, target, table)


def lower_bound(source: Layout, target: Layout) -> int:
    """The minimum number of bytes to send: those that each rank needs and does not hold."""
    alike = Counter((source.tensors[name], needed) for name, needed in target.tensors.items())
    total = 0
    for (held, needed), count in alike.items():
        boxes, wants = needed.all_boxes(target.mesh)
        held_boxes, holds = held.all_boxes(source.mesh)
        both = wants & holds
        missing = _volumes(boxes[wants]).sum() - _shared(boxes[both], held_boxes[both]).sum()
        total += count * needed.itemsize * int(missing)
    return total


def gathering_volume(source: Layout) -> int:
    """The number of bytes sent if every rank gathers every whole tensor."""
    whole = sum(prod(tensor.shape) * tensor.itemsize for tensor in source.tensors.values())
    return sum(whole - source.num_bytes(rank) for rank in range(source.mesh.size))


class _Slices:
    """Slices, each once, by number."""

    def __init__(self) -> None:
        self.found: dict[Box, int] = {}

    def number(self, box: Box) -> int:
        return self.found.setdefault(box, len(self.found))


@dataclass(frozen=True)
class _Fetches:
    """Slices that ranks need of each of several tensors that are divided alike: one row for each.

    Attributes:
        tensors: their numbers.
        target, box, num_bytes: of the slice.
        held_by: which of `holders` has it.
        holders: ranks that hold the same slice.
    """

    tensors: np.ndarray
    target: np.ndarray
    box: np.ndarray
    num_bytes: np.ndarray
    held_by: np.ndarray
    holders: list[np.ndarray]

    @classmethod
    def of(
        cls,
        name: str,
        held: TensorLayout,
        wanted: TensorLayout,
        source: Mesh,
        target: Mesh,
        tensors: np.ndarray,
        slices: _Slices,
    ) -> _Fetches:
        source_boxes, holds = held.all_boxes(source)
        boxes, wants = wanted.all_boxes(target)
        ranks_of: dict[bytes, list[int]] = {}
        for rank in np.flatnonzero(holds).tolist():
            ranks_of.setdefault(source_boxes[rank].tobytes(), []).append(rank)
        holders = [np.array(ranks) for ranks in ranks_of.values()]
        held_boxes = source_boxes[[ranks[0] for ranks in holders]]
        alike: dict[tuple[bytes, bytes], list[int]] = {}
        for rank in np.flatnonzero(wants).tolist():
            held_box = source_boxes[rank].tobytes() if holds[rank] else b"-"
            alike.setdefault((boxes[rank].tobytes(), held_box), []).append(rank)
        columns: list[np.ndarray] = []
        for ranks in alike.values():
            rank = ranks[0]
            whole = _as_box(boxes[rank])
            parts = []
            for missing in difference(whole, _as_box(source_boxes[rank])) if holds[rank] else [whole]:
                num_held = 0
                low, high = _overlap(np.array(missing, dtype=np.int64).reshape(1, -1, 2), held_boxes)
                volumes = np.maximum(high - low, 0).prod(axis=1)
                for holder in np.flatnonzero(volumes).tolist():
                    part = tuple(zip(low[holder].tolist(), high[holder].tolist(), strict=True))
                    num_held += int(volumes[holder])
                    parts.append((slices.number(part), int(volumes[holder]) * wanted.itemsize, holder))
                if num_held != volume(missing):
                    raise ValueError(
                        f"{name} {missing}: rank {rank} wants it and the source layout has {num_held} of its elements."
                    )
            if parts:
                there = np.tile(np.array(parts, dtype=np.int64), (len(ranks), 1))
                columns.append(np.concatenate([np.repeat(ranks, len(parts))[:, None], there], axis=1))
        rows = np.concatenate(columns) if columns else np.zeros((0, 4), dtype=np.int64)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return cls(tensors, rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], holders)

    def add_forced(self, load: np.ndarray) -> None:
        """Count what has one holder alone: it is known who sends it."""
        for number, ranks in enumerate(self.holders):
            if len(ranks) == 1:
                load[ranks[0]] += len(self.tensors) * int(self.num_bytes[self.held_by == number].sum())

    def rows(self, load: np.ndarray) -> tuple[np.ndarray, ...]:
        """Tensor, box, sender, receiver and bytes of all moves; senders are those that have sent least so far."""
        count, width = len(self.tensors), len(self.target)
        sender = np.zeros((count, width), dtype=np.int64)
        for number, ranks in enumerate(self.holders):
            at = np.flatnonzero(self.held_by == number)
            if len(ranks) == 1:
                sender[:, at] = ranks[0]
                continue
            for num_bytes in np.unique(self.num_bytes[at])[::-1].tolist():
                same = at[self.num_bytes[at] == num_bytes]
                shares = _fill_evenly(load[ranks], num_bytes, count * len(same))
                load[ranks] += shares * num_bytes
                turns = np.repeat(np.arange(len(ranks)), shares)  # then mixed, so that each tensor has its share of all
                within = np.arange(len(turns)) - np.repeat(np.cumsum(shares) - shares, shares)
                turns = turns[np.argsort((within + 0.5) / shares[turns], kind="stable")]
                sender[:, same] = np.sort(ranks[turns].reshape(count, len(same)), axis=1)  # near ones to near ones
        repeated = (np.tile(x, count) for x in (self.box, self.target, self.num_bytes))
        box, target, num_bytes = repeated
        return np.repeat(self.tensors, width), box, sender.reshape(-1), target, num_bytes


def _fill_evenly(load: np.ndarray, num_bytes: int, count: int) -> np.ndarray:
    """Numbers of `count` equal items that ranks take, so that the largest load becomes as small as can be."""
    order = np.argsort(load, kind="stable")
    level, sizes = load[order], np.arange(1, len(load) + 1)
    fitting = int((sizes * level - np.cumsum(level) <= count * num_bytes).sum())
    height = (count * num_bytes + level[:fitting].sum()) / fitting
    shares = np.zeros(len(load), dtype=np.int64)
    shares[:fitting] = np.maximum(0, np.floor((height - level[:fitting]) / num_bytes))
    remaining = count - int(shares.sum())
    for index in np.argsort(level[:fitting] + shares[:fitting] * num_bytes, kind="stable")[:remaining]:
        shares[index] += 1
    assert shares.sum() == count
    filled = np.zeros_like(shares)
    filled[order] = shares
    return filled


def _overlap(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last of what slices [n axes 2] share."""
    return np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])


def _shared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low, high = _overlap(a, b)
    return np.maximum(high - low, 0).prod(axis=-1)


def _volumes(boxes: np.ndarray) -> np.ndarray:
    return (boxes[..., 1] - boxes[..., 0]).prod(axis=-1)


def _as_box(sides: np.ndarray) -> Box:
    return tuple((start, stop) for start, stop in sides.tolist())


def _refuse_unequal(source: Layout, target: Layout) -> None:
    if source.mesh.size != target.mesh.size:
        raise ValueError(f"{source.mesh.size} ranks on one side and {target.mesh.size} on the other: must be the same.")
    for name in target.tensors.keys() | source.tensors.keys():
        shapes = [side.tensors[name].shape if name in side.tensors else None for side in (source, target)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name}: shape {shapes[0]} on one side and {shapes[1]} on the other: must be the same.")
