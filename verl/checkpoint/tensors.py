"""Logical tensors: what a model or an optimizer holds, whatever number of writers cut it into slices.

The slices of a tensor must tile it: cover each element exactly once. Nothing here knows how many writers there were,
so a checkpoint written by eight can be read by three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MOST_CELLS = 100_000  # looked at to name a hole; beyond it the count of missing elements is said


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A rectangular part of a tensor, row-major and without gaps in a file.

    Args:
        file: path within the checkpoint.
        key: the name in that file's safetensors header, or None where the file is something else.
        offset: of the first byte, from the beginning of the file.
        start, extent: the first index and the length in every dimension of the tensor.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    extent: tuple[int, ...]
    key: str | None = None

    @property
    def end(self) -> tuple[int, ...]:
        """The first index in every dimension that is no longer in the slice."""
        return tuple(start + extent for start, extent in zip(self.start, self.extent))

    @property
    def num_elements(self) -> int:
        """1 for a tensor without dimensions."""
        return math.prod(self.extent)


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """A whole tensor and where its slices lie.

    >>> halves = [Slice(file="a", offset=0, start=(i,), extent=(2,)) for i in (0, 2)]
    >>> LogicalTensor(component="actor", name="bias", dtype="F32", shape=(4,), slices=tuple(halves)).faults()
    []

    Args:
        component: such as `actor` or `optimizer`.
        name: within the component, the same whatever the number of writers.
        dtype: as safetensors calls it, `F32` or `BF16`.
        shape: of the whole tensor.
    """

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def full_name(self) -> str:
        """Component and name, as messages show it."""
        return f"{self.component}/{self.name}"

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def slice_bytes(self, part: Slice) -> int:
        """How long a slice is in its file."""
        return part.num_elements * ITEM_BYTES[self.dtype]

    def faults(self) -> list[str]:
        """Why the slices do not cover the tensor exactly once; empty where they do."""
        if self.dtype not in ITEM_BYTES:
            return [f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}"]
        if outside := [part for part in self.slices if not self._holds(part)]:
            return [f"{_place(part)} does not lie within the shape {list(self.shape)}" for part in outside]
        if overlaps := [f"{_place(a)} and {_place(b)} overlap" for a, b in _overlapping(self.slices)]:
            return overlaps
        missing = math.prod(self.shape) - sum(part.num_elements for part in self.slices)
        return [f"{_hole(self.shape, self.slices)} is in no slice ({missing} elements are missing)"] if missing else []

    def _holds(self, part: Slice) -> bool:
        if not len(part.start) == len(part.extent) == len(self.shape) or part.offset < 0:
            return False
        sides = zip(part.start, part.extent, self.shape)
        return all(start >= 0 and extent >= 0 and start + extent <= size for start, extent, size in sides)


def join_tensors(parts: Iterable[LogicalTensor]) -> tuple[list[LogicalTensor], list[str]]:
    """Join what several writers say of the same tensors.

    Returns:
        The tensors in order of component and name, and the contradictions between writers.
    """
    joined: dict[tuple[str, str], LogicalTensor] = {}
    contradictions = []
    for part in parts:
        known = joined.setdefault((part.component, part.name), part)
        if known is part:
            continue
        if (known.dtype, known.shape) != (part.dtype, part.shape):
            seen = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in (known, part)]
            contradictions.append(f"{part.full_name} is {seen[0]} to one writer and {seen[1]} to another")
            continue
        joined[part.component, part.name] = LogicalTensor(
            component=part.component, name=part.name, dtype=part.dtype, shape=part.shape,
            slices=known.slices + part.slices,
        )  # fmt: skip
    return [joined[key] for key in sorted(joined)], contradictions


def _overlapping(slices: Sequence[Slice]) -> list[tuple[Slice, Slice]]:
    """Pairs that share an element. Sorted along the first dimension, a slice meets only its near neighbours."""
    ordered = sorted((part for part in slices if part.num_elements), key=lambda part: part.start)
    pairs = []
    for number, first in enumerate(ordered):
        for second in itertools.islice(ordered, number + 1, None):
            if first.start and second.start[0] >= first.end[0]:
                break
            if all(a < d and c < b for a, b, c, d in zip(first.start, first.end, second.start, second.end)):
                pairs.append((first, second))
    return pairs


def _hole(shape: tuple[int, ...], slices: Sequence[Slice]) -> str:
    """The first box that no slice covers, among the boxes that the edges of all slices cut the tensor into."""
    edges = [
        sorted({0, size} | {edge for part in slices for edge in (part.start[dim], part.end[dim])})
        for dim, size in enumerate(shape)
    ]
    for box in itertools.islice(itertools.product(*(itertools.pairwise(cuts) for cuts in edges)), MOST_CELLS):
        low = [side[0] for side in box]
        if not any(all(a <= x < b for a, b, x in zip(part.start, part.end, low)) for part in slices):
            return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"
    return "a part of the tensor"


def _place(part: Slice) -> str:
    bounds = ", ".join(f"{start}:{start + extent}" for start, extent in zip(part.start, part.extent))
    return f"slice [{bounds}] of {part.file}"
