"""Layouts: which rank holds which slice of which tensor. Arithmetic on shapes: no tensor, no process, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Box = tuple[tuple[int, int], ...]
"""A slice of a tensor: for each axis [start, stop)."""


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged along named dimensions.

    Args:
        dims: (name, size), from the slowest to the fastest: `(("dp", 2), ("tp", 4))` puts ranks 0-3 into one tp group.
        joined: (name, adjacent dimensions) that can also be used as one: tensors may be split over each of them, or
            over all in equal pieces.
    """

    dims: tuple[tuple[str, int], ...]
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dims]
        if len(set(names)) < len(names):
            raise ValueError(f"mesh dimensions {names}: each may be named once.")
        if any(size < 1 for _, size in self.dims):
            raise ValueError(f"mesh {dict(self.dims)}: sizes must be at least 1.")

    @property
    def size(self) -> int:
        return prod(size for _, size in self.dims)

    def extent(self, name: str) -> int:
        """The size of a dimension; 1 for one that the mesh does not have."""
        return (
            prod(self.extent(part) for part in parts) if (parts := self._axes(name)) else dict(self.dims).get(name, 1)
        )

    def _axes(self, name: str) -> tuple[str, ...]:
        return dict(self.joined).get(name, ())

    @cached_property
    def _coordinates_of_rank(self) -> dict[int, dict[str, int]]:
        coordinates_of = {}
        for rank in range(self.size):
            index, coordinates = rank, {}
            for name, size in reversed(self.dims):
                index, coordinates[name] = divmod(index, size)
            coordinates_of[rank] = coordinates
        return coordinates_of

    def coordinate(self, rank: int, name: str) -> int:
        """Coordinate of a rank along a dimension; 0 along one that the mesh does not have."""
        index = self._coordinates_of_rank[rank].get(name, 0)
        for part in self._axes(name):
            index = index * self.extent(part) + self._coordinates_of_rank[rank][part]
        return index

    def coordinates(self, name: str) -> np.ndarray:
        """`coordinate` of every rank, [size]."""
        import numpy as np

        if name not in self._coordinates:
            self._coordinates[name] = np.array([self.coordinate(rank, name) for rank in range(self.size)])
        return self._coordinates[name]

    @cached_property
    def _coordinates(self) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True)
class TensorLayout:
    """Division of one tensor over the ranks of a mesh.

    Attributes:
        shape: of the whole tensor.
        splits: (mesh dimension, axis), carried out one after the other, each on what the one before left; pieces are
            of equal size but the last ones, as `torch.chunk` cuts them. Along other dimensions it is repeated.
        stage: the one stage of pipeline (mesh dimension `pp`) that holds it; None: all of them.
        itemsize: bytes of one element.
        boxes: what each rank holds, in place of `splits`, where no mesh says it; None for nothing.
    """

    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...] = ()
    stage: int | None = None
    itemsize: int = 4
    boxes: tuple[Box | None, ...] | None = None

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """Slice that a rank holds; None if nothing."""
        if self.boxes is not None:
            own = self.boxes[rank]
            return own if own is not None and volume(own) else None
        if self.stage is not None and mesh.coordinate(rank, "pp") != self.stage:
            return None
        box = [(0, size) for size in self.shape]
        for name, axis in self.splits:
            start, stop = box[axis]
            piece = -(-(stop - start) // mesh.extent(name))
            first = min(start + mesh.coordinate(rank, name) * piece, stop)
            box[axis] = (first, min(first + piece, stop))
        return tuple(box) if volume(box) else None

    def all_boxes(self, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
        """`box` of every rank, [ranks, axes, 2] integers, and which ranks hold something, [ranks] bool."""
        import numpy as np

        boxes = np.zeros((mesh.size, len(self.shape), 2), dtype=np.int64)
        if self.boxes is not None:
            holds = np.array([box is not None for box in self.boxes])
            boxes[holds] = np.array([box for box in self.boxes if box is not None]).reshape(-1, len(self.shape), 2)
        else:
            holds = np.ones(mesh.size, dtype=bool) if self.stage is None else mesh.coordinates("pp") == self.stage
            boxes[:, :, 1] = self.shape
            for name, axis in self.splits:
                start, stop = boxes[:, axis, 0], boxes[:, axis, 1]
                piece = -(-(stop - start) // mesh.extent(name))
                first = np.minimum(start + mesh.coordinates(name) * piece, stop)
                boxes[:, axis] = np.stack([first, np.minimum(first + piece, stop)], axis=1)
        return boxes, holds & (boxes[:, :, 1] > boxes[:, :, 0]).all(axis=1)


@dataclass(frozen=True)
class Layout:
    """Division of all tensors over the ranks of a mesh."""

    mesh: Mesh
    tensors: Mapping[str, TensorLayout]

    def holds(self, rank: int, name: str) -> Box | None:
        """The slice of a tensor that a rank has."""
        return self.tensors[name].box(self.mesh, rank)

    def num_bytes(self, rank: int) -> int:
        """Bytes that a rank holds of all tensors."""
        alike = Counter(self.tensors.values())
        boxes = ((tensor.box(self.mesh, rank), tensor.itemsize * count) for tensor, count in alike.items())
        return sum(volume(box) * num_bytes for box, num_bytes in boxes if box is not None)


def volume(box: Sequence[tuple[int, int]]) -> int:
    """Elements of a slice; 1 for the slice of a scalar."""
    return prod(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Intersection of two slices; None if empty."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """The index of a box in the tensor of one that contains it."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True))


def difference(a: Box, b: Box) -> Iterator[Box]:
    """`a` without `b`, as slices that do not overlap."""
    shared = intersection(a, b)
    if shared is None:
        yield a
        return
    remaining = list(a)
    for axis, (start, stop) in enumerate(shared):
        for edge in ((remaining[axis][0], start), (stop, remaining[axis][1])):
            if edge[0] < edge[1]:
                yield (*remaining[:axis], edge, *remaining[axis + 1 :])
        remaining[axis] = (start, stop)
