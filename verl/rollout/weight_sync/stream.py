"""A stream of weights into an engine through shared memory: two chunks, filled by the trainer, emptied by each reader.

    trainer: tensor, tensor, ... ──copy──> chunk 0 | chunk 1 ──read──> engine process(es)
             └ waits until every reader has left the chunk          └ wait until it is filled

No file and no second copy of the model is needed, only two chunks. On a CPU a chunk is unnamed shared memory, which is
freed when the last process that maps it ends; on a GPU it is device memory, opened by its CUDA IPC handle, unless a
reader on another GPU has no peer access to it. The counters of both kinds are in shared memory.

`Feed` describes a stream before it starts: its readers, and the position of each tensor (`plan_chunks`).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from verl.ops.resharding.layout import Box
from verl.rollout.weight_sync.state_dict import block_of
from verl.utils.memory import shareable_allocations
from verl.utils.progress import nameless_file, report

WantedSlices = dict[str, Box]  # slice of each tensor for one process of an engine
Shape = tuple[int, ...]

ALIGNMENT = 64  # bytes: alignment of tensors in a chunk
HEAD_BYTES = mmap.PAGESIZE  # counters: chunks filled, abandoned or not, chunks emptied by each reader
FILLED, ABANDONED, FIRST_READER = 0, 1, 2
POLL_INTERVAL_S = 5e-5
CHECK_EVERY = 2000  # looks, between two questions whether the other side lives
LOADING = "loading weights"
DEVICE_ARGUMENT = 6  # of what reduce_tensor gives: the number of the GPU


@dataclass(frozen=True)
class ChunkEntry:
    """Position in a chunk of one tensor, or of some rows of a tensor that is larger than a chunk.

    Attributes:
        shape: of the tensor.
        begin: the first of its rows.
        whole: shape of the whole tensor, if these are some of its rows; None if it is complete.
    """

    name: str
    shape: Shape
    offset: int
    begin: int = 0
    whole: Shape | None = None

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
class Feed:
    """The weights that one process sends to an engine.

    Attributes:
        wanted: the slice that it needs of each tensor of the running model.
        readers: the workers of the engine that read its stream.
        chunks: of the stream; empty if it feeds nothing.
        chunk_bytes: of the largest chunk.
        slices: of each tensor that is sent as a slice, the whole shape and the start of the slice.
        handle: of the stream, once it is open.
    """

    wanted: WantedSlices = field(default_factory=dict)
    readers: tuple[int, ...] = ()
    chunks: ChunkPlan = field(default_factory=list)
    chunk_bytes: int = 0
    slices: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    handle: StreamHandle | None = None

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the whole tensors that it brings, by name."""
        shapes = {entry.name: entry.whole or entry.shape for entries in self.chunks for entry in entries}
        return shapes | {name: shape for name, (shape, _) in self.slices.items()}


def plan_chunks(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, chunk_bytes: int) -> tuple[ChunkPlan, int]:
    """Distribute tensors over chunks. Tensors and blocks that fit in a chunk are not split; a larger tensor is sent in
    several chunks, some rows at a time.

    Returns:
        The chunks, and the bytes of the largest, which are more than `chunk_bytes` only where a single row is.
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


class StreamBroken(RuntimeError):
    """The other side has exited or closed the stream."""


class StreamWriter:
    """Writer of the stream, in the trainer.

    Args:
        chunk_bytes: of each of the two chunks.
        num_readers: processes that read all of it.
        device: device of the chunks.
    """

    def __init__(self, chunk_bytes: int, num_readers: int, device: torch.device):
        self.chunk_bytes = chunk_bytes
        size = HEAD_BYTES + (0 if device.type == "cuda" else 2 * chunk_bytes)
        self._fd = nameless_file(size)
        self._memory = mmap.mmap(self._fd, size)
        self._head = _head(self._memory)
        self._num_readers = num_readers
        self._chunks, on_device = _chunks(self._memory, chunk_bytes), None
        if device.type == "cuda":
            with shareable_allocations():
                self._chunks = torch.empty(2, chunk_bytes, dtype=torch.uint8, device=device)
            from torch.multiprocessing.reductions import reduce_tensor

            on_device = reduce_tensor(self._chunks)  # the CUDA IPC handle by which another process opens it
        self.handle = StreamHandle(f"/proc/{os.getpid()}/fd/{self._fd}", uuid4().hex, size, chunk_bytes, on_device)

    def begin(self, num_readers: int | None = None) -> None:
        """Reset the counters; readers may open the stream afterwards, fewer of them if a number is given."""
        self._head.zero_()
        if num_readers is not None:
            self._num_readers = num_readers

    def fill(
        self,
        chunks: ChunkPlan,
        tensors: Iterator[tuple[str, Tensor]],
        dtype: torch.dtype,
        is_reader_alive: Callable[[], bool],
        note: Callable[[str, Tensor], object] = lambda name, tensor: None,
    ) -> float:
        """Copy (name, tensor) in the order of a plan. Returns the seconds spent on computing and copying them, without
        waiting.

        Args:
            note: called with the name and value of each tensor.
        Raises:
            StreamBroken: a reader is gone.
        """
        copying, name, tensor = 0.0, "", torch.empty(0)
        for number, entries in enumerate(chunks):
            self._wait_for_readers(number - 1, is_reader_alive)
            views, parts = [], []
            for entry in entries:
                start = time.perf_counter()
                if entry.begin == 0:
                    name, tensor = next(tensors)
                assert name == entry.name
                part = tensor if entry.whole is None else tensor[entry.begin : entry.begin + entry.shape[0]]
                views.append(chunk_view(self._chunks[number % 2], entry, dtype))
                parts.append(part)
                copying += time.perf_counter() - start
                if entry.is_last:
                    note(name, tensor)
            start = time.perf_counter()
            if views:
                torch.ops.aten._foreach_copy_(views, parts)
            copying += time.perf_counter() - start
            if self._chunks.is_cuda:
                torch.cuda.synchronize(self._chunks.device)
            self._head[FILLED] = number + 1
        return copying

    def abandon(self) -> None:
        """Wake all readers with an error."""
        self._head[ABANDONED] = 1

    @property
    def is_abandoned(self) -> bool:
        """Whether one side has given up."""
        return bool(self._head[ABANDONED])

    def close(self) -> None:
        """Give the memory back."""
        self._chunks = self._head = torch.empty(0)
        self._memory.close()
        os.close(self._fd)

    def _wait_for_readers(self, count: int, is_reader_alive: Callable[[], bool]) -> None:
        """Wait until every reader has read this many chunks."""
        readers = self._head[FIRST_READER : FIRST_READER + self._num_readers]
        _wait(lambda: bool((readers >= count).all()), is_reader_alive)


class StreamReader:
    """Reader of the stream, in an engine process.

    Args:
        number: of this reader, from 0.
    Attributes:
        waited_s: seconds spent waiting for chunks so far.
    """

    def __init__(self, handle: StreamHandle, number: int = 0):
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, handle.num_bytes)
        finally:
            os.close(fd)
        self._head, self._number, self._is_of = _head(self._memory), number, (handle.name, number)
        if handle.on_device is None:
            self._chunks = _chunks(self._memory, handle.chunk_bytes)
        else:
            self._chunks = _opened(handle.on_device)
        self.waited_s = 0.0
        self._arriving = torch.empty(0)  # a tensor that comes by its rows

    def is_of(self, handle: StreamHandle, number: int) -> bool:
        """Whether this object reads that stream with that reader number."""
        return self._is_of == (handle.name, number)

    def chunk(self, number: int, entries: Sequence[ChunkEntry], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a chunk by name, views of it that last until `leave`; one that comes by its rows is put
        together, and given with the last of them.

        Raises:
            StreamBroken: the trainer is gone, or has given up.
        """
        for entry, tensor in self.pieces(number, entries, dtype):
            if entry.whole is None:
                yield entry.name, tensor
                continue
            if entry.begin == 0:
                self._arriving = torch.empty(entry.whole, dtype=dtype, device=tensor.device)
            self._arriving[entry.begin : entry.begin + entry.shape[0]] = tensor
            if entry.is_last:
                whole, self._arriving = self._arriving, torch.empty(0)
                yield entry.name, whole

    def pieces(
        self, number: int, entries: Sequence[ChunkEntry], dtype: torch.dtype
    ) -> Iterator[tuple[ChunkEntry, Tensor]]:
        """The content of a chunk: tensors, and rows of some, as views that are valid until `leave`.

        Raises:
            StreamBroken: the trainer is gone, or has given up.
        """
        start = time.perf_counter()
        _wait(lambda: int(self._head[FILLED]) > number, self._may_go_on)
        self.waited_s += time.perf_counter() - start
        for entry in entries:
            report(LOADING)
            yield entry, chunk_view(self._chunks[number % 2], entry, dtype)

    def _may_go_on(self) -> bool:
        report("waiting for weights of the trainer")  # who is to blame, if that takes long
        return not int(self._head[ABANDONED])

    def leave(self, number: int) -> None:
        """Release a chunk, so that it can be filled again."""
        if self._chunks.is_cuda:
            torch.cuda.synchronize(self._chunks.device)
        self._head[FIRST_READER + self._number] = number + 1

    def abandon(self) -> None:
        """Wake the trainer with an error."""
        self._head[ABANDONED] = 1

    def close(self) -> None:
        """Let go of the memory."""
        self._chunks = self._head = torch.empty(0)
        self._memory.close()


def _wait(is_so: Callable[[], bool], may_go_on: Callable[[], bool]) -> None:
    for num_polls in range(1, 1 << 62):
        if is_so():
            return
        if num_polls % CHECK_EVERY == 0 and not may_go_on():
            raise StreamBroken("the other side of the stream of weights is gone")
        time.sleep(POLL_INTERVAL_S)


def _head(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.int64, count=HEAD_BYTES // 8)


def _chunks(memory: mmap.mmap, chunk_bytes: int) -> Tensor:
    if len(memory) == HEAD_BYTES:
        return torch.empty(0)
    chunks = torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD_BYTES, count=2 * chunk_bytes)
    return chunks.view(2, chunk_bytes)


def reads_peers(device: torch.device) -> bool:
    """Whether a process on this device can open memory of all GPUs that it sees: the machine gives it peer access (over
    NVLink, or PCIe without isolation)."""
    if device.type != "cuda":
        return True
    index = device.index or 0
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    return all(torch.cuda.can_device_access_peer(index, other) for other in others)


def _opened(handle: tuple[Any, ...]) -> Tensor:
    """A tensor of another process, opened on this process's current GPU, since device indices differ between
    processes. Memory of another GPU is read over peer access, which `reads_peers` has confirmed."""
    rebuild, arguments = handle
    arguments = list(arguments)
    arguments[DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild(*arguments)
