"""What goes through a stream of weights, told beforehand: which tensor lies where in which chunk, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.rollout.vllm.weights import block_of

ALIGNMENT = 64  # bytes, of each tensor in a chunk


@dataclass(frozen=True)
class Place:
    """Where one tensor of a chunk lies."""

    name: str
    shape: tuple[int, ...]
    offset: int


Plan = list[list[Place]]  # of each chunk in turn


@dataclass(frozen=True)
class Handle:
    """What a reader needs to open the stream.

    Attributes:
        path: leads to the memory while the trainer lives.
        name: of this memory alone; a path may come to lead to another.
    """

    path: str
    name: str
    num_bytes: int
    chunk_bytes: int
    on_device: tuple[Any, ...] | None


@dataclass(frozen=True)
class Slice:
    """Of a tensor that comes as a slice: the shape of the whole one, and where the slice begins in it."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Feed:
    """What one process of an engine reads.

    Attributes:
        handle: of the stream.
        reader: its number among those who read the same stream.
        chunks: of the stream.
        slices: by name, the tensors that do not come whole.
    """

    handle: Handle
    reader: int
    chunks: Plan
    slices: Mapping[str, Slice] = field(default_factory=dict)


@dataclass(frozen=True)
class Loading:
    """How a stream is to be read.

    Attributes:
        num_threads: of each reader meanwhile, on a CPU: trainer and engine work at the same time.
        in_place: put the tensors in the places that were found for them; False has the engine load its model anew.
    """

    num_threads: int
    in_place: bool = True


class Sized(Protocol):
    """A tensor that will come."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


def plan(weights: Iterable[Sized], dtype: torch.dtype, chunk_bytes: int) -> tuple[Plan, int]:
    """Spread tensors over chunks, none of them cut in two, and no block of them that would fit in one chunk.

    Also gives the bytes of the largest chunk.
    """
    chunks: Plan = [[]]
    end = largest = 0
    for _, block in groupby(weights, key=lambda weight: block_of(weight.name)):
        sizes = [(weight, prod(weight.shape) * dtype.itemsize) for weight in block]
        whole = sum(_aligned(size) for _, size in sizes)
        for number, (weight, size) in enumerate(sizes):
            needed = whole if number == 0 and whole <= chunk_bytes else size
            if chunks[-1] and end + needed > chunk_bytes:
                chunks.append([])
                end = 0
            chunks[-1].append(Place(weight.name, tuple(weight.shape), end))
            largest = max(largest, end + size)
            end += _aligned(size)
    return chunks, largest


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def view(chunk: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """A tensor's place in a chunk, as a tensor."""
    size = prod(place.shape) * dtype.itemsize
    return chunk[place.offset : place.offset + size].view(dtype).view(place.shape)
