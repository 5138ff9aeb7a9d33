"""Chunks of a stream of weights, described before it starts: the position of each tensor, and which worker reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

from verl.ops.resharding.layout import Box
from verl.rollout.weight_sync.state_dict import block_of

WantedSlices = dict[str, Box]  # slice of each tensor for one process of an engine


ALIGNMENT = 64  # bytes: alignment of tensors in a chunk


@dataclass(frozen=True)
class ChunkEntry:
    """Position in a chunk of one tensor, or of some rows of a tensor that is larger than a chunk.

    Attributes:
        shape: of the tensor.
        begin: the first of its rows.
        whole: shape of the whole tensor, if these are some of its rows; None if it is complete.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    begin: int = 0
    whole: tuple[int, ...] | None = None

    @property
    def is_last(self) -> bool:
        """Whether this completes the tensor."""
        return self.whole is None or self.begin + self.shape[0] == self.whole[0]


ChunkPlan = list[list[ChunkEntry]]  # of each chunk in turn


@dataclass(frozen=True)
class StreamHandle:
    """Information that a reader needs in order to open the stream.

    Attributes:
        path: opens the memory while the trainer lives.
        name: unique to this memory, since a path may be reused.
    """

    path: str
    name: str
    num_bytes: int
    chunk_bytes: int
    on_device: tuple[Any, ...] | None


@dataclass(frozen=True)
class TensorSlice:
    """Slice of a tensor: the shape of the whole one, and where the slice begins in it."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class FeedPlan:
    """Plan of what one process of an engine reads from a stream.

    Attributes:
        handle: of the stream.
        reader: its index among the readers of the stream.
        chunks: of the stream.
        slices: tensors that are received as slices, by name.
    """

    handle: StreamHandle
    reader: int
    chunks: ChunkPlan
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)


def plan_chunks(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, chunk_bytes: int) -> tuple[ChunkPlan, int]:
    """Distribute tensors over chunks. Tensors and blocks that fit in a chunk are not split; a larger tensor is sent in
    several chunks, some rows at a time.

        Also gives the bytes of the largest chunk, which are more than `chunk_bytes` only where a single row is.
    """
    chunks: ChunkPlan = [[]]
    end = largest = 0
    for _, block in groupby(shapes, key=block_of):
        sizes = {name: prod(shapes[name]) * dtype.itemsize for name in block}
        whole = sum(map(_aligned, sizes.values()))
        for number, (name, size) in enumerate(sizes.items()):
            of_tensor = tuple(shapes[name])
            needed = whole if number == 0 and whole <= chunk_bytes else size
            rows = of_tensor[0] if of_tensor else 1
            if size > chunk_bytes and rows > 1:
                most = max(1, chunk_bytes // (size // rows))  # rows in a chunk
                for begin in range(0, rows, most):
                    if chunks[-1]:
                        chunks.append([])
                    shape = (min(most, rows - begin), *of_tensor[1:])
                    chunks[-1].append(ChunkEntry(name, shape, 0, begin, of_tensor))
                    end = prod(shape) * dtype.itemsize
                    largest, end = max(largest, end), _aligned(end)
                continue
            if chunks[-1] and end + needed > chunk_bytes:
                chunks.append([])
                end = 0
            chunks[-1].append(ChunkEntry(name, of_tensor, end))
            largest = max(largest, end + size)
            end += _aligned(size)
    return chunks, largest


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def chunk_view(chunk: Tensor, entry: ChunkEntry, dtype: torch.dtype) -> Tensor:
    """View of a tensor in a chunk."""
    size = prod(entry.shape) * dtype.itemsize
    return chunk[entry.offset : entry.offset + size].view(dtype).view(entry.shape)


@dataclass(frozen=True)
class SyncOffer:
    """The part of a sync's description that is constant during the lifetime of an engine.

    Attributes:
        wants: the slices that each of its workers needs; None: whole tensors are sent to all workers.
        num_workers: of the engine.
        process_id: of the engine.
        progress_path: opens its progress counter.
        call_timeout_s: largest time without progress, after which it counts as lost.
        num_threads: threads of trainer and engine each, while both work.
        reads_peers: whether each worker can open memory of all GPUs of the engine.
    """

    wants: tuple[WantedSlices, ...] | None
    num_workers: int
    process_id: int
    progress_path: str
    call_timeout_s: float
    num_threads: int
    reads_peers: bool = True
