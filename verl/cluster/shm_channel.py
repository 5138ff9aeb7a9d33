"""Message channel between the driver and a worker: pickles through a socket, tensor bytes through shared memory.

    MessagePacker ──> Message ──ShmChannel.send──> socket: pickle, location of bytes ──> ShmChannel.receive ──> value
                        └──bytes──> shared block ───────────────────────────────────────────> views of its tensors

Shared blocks are reused, because the first access to a page takes several times as long as copying it. They are
anonymous files passed as open descriptors, so that a killed process leaves no file. The receiver's next message lists
the blocks that it has released.

A value is serialized to a small pickle and separate buffers with the bytes of its tensors:

value ──wrap──> (pickle, buffers) ──shared memory──> unwrap ──> the value, its tensors are views of the buffers
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.serialization import raw_bytes
from verl.utils.child_process.channel import Channel
from verl.utils.progress import nameless_file

FREE_BLOCKS_KEPT = 12
WASTE = 4  # maximum ratio of a block's size to the request
ALIGNMENT = 64  # bytes: alignment of tensors


warnings.filterwarnings("ignore", message=".*buffer is not writable.*")  # received fields are read-only


class Serialized(NamedTuple):
    """A serialized value: memory that is shared without a copy is in `buffers`, everything else in `head`."""

    head: bytes
    buffers: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def serialize(value: Any) -> Serialized:
    """A value as a pickle and the memory of its tensors, not copied: do not modify them until it is sent."""
    head, buffers = io.BytesIO(), list[np.ndarray]()
    _BatchPickler(head, 5, buffer_callback=lambda kept: buffers.append(np.frombuffer(kept.raw(), np.uint8))).dump(value)
    return Serialized(head.getvalue(), buffers)


def deserialize(serialized: Serialized | tuple[bytes, Sequence[Any]]) -> Any:
    """The value; its tensors share the memory of the buffers, and are read-only if the buffers are."""
    head, buffers = serialized
    return pickle.loads(head, buffers=buffers)


class _BatchPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DataProto:  # its own pickling copies on arrival, to protect it from writers
            return _batch, _fields(obj)
        if not isinstance(obj, Tensor) or obj.layout != torch.strided or obj.is_quantized or obj.is_nested:
            return NotImplemented
        if not obj.numel():
            return _empty, (tuple(obj.shape), obj.dtype)
        buffer: Any = raw_bytes(obj).numpy()
        return _tensor, (pickle.PickleBuffer(buffer), obj.dtype, tuple(obj.shape))


def _fields(batch: DataProto) -> tuple[Any, ...]:
    tensors, arrays, meta_info, sources, bound, ragged = batch._fields()
    return dict(tensors), dict(arrays), meta_info, sources, bound, {name: x.compact() for name, x in ragged.items()}


def _batch(*fields: Any) -> DataProto:
    return DataProto()._fill(*fields)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(eq=False)
class ShmBlock:
    """A block of memory.

    Attributes:
        number: unique in this process.
        descriptor: of the shared file; None once it is closed.
        holders: number of receivers that must release it before it is reused.
    """

    number: int
    size: int
    memory: mmap.mmap
    descriptor: int | None
    holders: int = 0


class ShmBlockPool:
    """Pool of reusable memory blocks, which other processes can read."""

    def __init__(self):
        self._lock = threading.RLock()  # the garbage collector may release a block during `take`
        self._all: dict[int, ShmBlock] = {}  # most recently used last
        self._made = 0

    def take(self, size: int, holders: int = 1) -> ShmBlock:
        """A block of at least `size` bytes, with arbitrary content."""
        with self._lock:
            free = [block for block in self._all.values() if not block.holders]
            fitting = [block for block in free if size <= block.size <= max(WASTE * size, mmap.PAGESIZE)]
            if fitting:
                block = self._all.pop(min(fitting, key=lambda block: block.size).number)
            else:
                for stale in free[: max(0, len(free) - FREE_BLOCKS_KEPT)]:
                    self._end(self._all.pop(stale.number))
                block = self._make(size + size // 4)
            block.holders = holders
            self._all[block.number] = block
            return block

    def give_back(self, number: int) -> None:
        """Release a block for one holder."""
        with self._lock:
            if (block := self._all.get(number)) is not None:
                block.holders -= 1

    def numbers(self) -> set[int]:
        """Numbers of all existing blocks."""
        with self._lock:
            return set(self._all)

    def close(self) -> None:
        """Free all blocks; those that another process still reads are freed when it is done."""
        with self._lock:
            for block in self._all.values():
                self._end(block)
            self._all.clear()

    def _make(self, size: int) -> ShmBlock:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._made += 1
        descriptor = nameless_file(size)
        return ShmBlock(self._made, size, map_shm_block(descriptor, size), descriptor)

    def _end(self, block: ShmBlock) -> None:
        if block.descriptor is not None:
            os.close(block.descriptor)
            block.descriptor = None


def lease(memory: mmap.mmap, on_end: Callable[[], object]) -> np.ndarray:
    """A view of `memory`; `on_end` is called when no object uses the view any more."""
    area = np.frombuffer(memory, np.uint8)
    weakref.finalize(area, on_end).atexit = False
    return area


def map_shm_block(descriptor: int, size: int) -> mmap.mmap:
    """Map an open file into memory."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # map all pages at once, if supported
    return mmap.mmap(descriptor, size, flags=flags)


SMALL = 2**15  # bytes: messages with fewer bytes of tensors go through the socket


@dataclass(frozen=True)
class Message:
    """A packed value for a fixed number of receivers.

    Attributes:
        head: see `Serialized`.
        inline: the bytes of tensors, if their total is less than `SMALL`.
        block, spans: shared block with the bytes, and their ranges in it.
    """

    head: bytes
    inline: list[bytes]
    block: ShmBlock | None = None
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _MessageHeader:
    """Message sent through the socket, with an open file for each block that is new to the receiver."""

    head: bytes
    inline: list[bytes]
    block: int | None
    spans: tuple[tuple[int, int], ...]
    new: tuple[tuple[int, int], ...]  # numbers and sizes
    done_with: tuple[int, ...]  # numbers of blocks of the receiver that the sender has released
    gone: tuple[int, ...]  # numbers of blocks that the sender has freed


class MessagePacker:
    """Packs the messages of a process into blocks that its receivers share."""

    def __init__(self):
        self.blocks = ShmBlockPool()

    def pack(self, value: Any, receivers: int = 1) -> Message:
        """A message for exactly this number of receivers; `value` may be modified afterwards.

        Args:
            value: any value; a `Serialized` one arrives deserialized.
        """
        head, buffers = value if isinstance(value, Serialized) else serialize(value)
        if sum(buffer.nbytes for buffer in buffers) < SMALL:
            return Message(head, [buffer.tobytes() for buffer in buffers])
        spans, end = [], 0
        for buffer in buffers:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + buffer.nbytes
            spans.append((start, end))
        block = self.blocks.take(end, receivers)
        area = np.frombuffer(block.memory, np.uint8)
        for buffer, (start, stop) in zip(buffers, spans, strict=True):
            area[start:stop] = buffer
        return Message(head, [], block, tuple(spans))

    def close(self) -> None:
        """Free the memory."""
        self.blocks.close()


class ShmChannel:
    """One end of a connection between two processes of this machine.

    One thread may send while another receives.

    Args:
        post: the packer of outgoing messages.
    """

    def __init__(self, channel: Channel, post: MessagePacker):
        self._channel, self._blocks = channel, post.blocks
        self._known: set[int] = set()  # our blocks that the other side has open
        self.theirs: dict[int, mmap.mmap] = {}
        self._done_with: deque[int] = deque()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the connection is closed.
        """
        known = self._known
        gone = tuple(known - self._blocks.numbers())
        known.difference_update(gone)
        block, files, sizes = message.block, [], ()
        if block is not None and block.number not in known:
            if block.descriptor is None:
                raise OSError("the memory of a message was let go of: the run is being closed")
            files, sizes = [block.descriptor], ((block.number, block.size),)
        done_with = tuple(self._done_with.popleft() for _ in range(len(self._done_with)))
        number = None if block is None else block.number
        header = _MessageHeader(message.head, message.inline, number, message.spans, sizes, done_with, gone)
        self._channel.send(header, files)
        known.update(number for number, _ in sizes)

    def receive(self) -> Any:
        """The value of the next message; its tensors may be kept.

        Raises:
            EOFError, OSError: the connection is closed.
        """
        envelope: _MessageHeader
        envelope, files = self._channel.receive_with_files()
        for number in envelope.done_with:
            self._blocks.give_back(number)
        for number in envelope.gone:
            self.theirs.pop(number, None)
        for (number, size), file in zip(envelope.new, files, strict=True):
            self.theirs[number] = map_shm_block(file, size)
            os.close(file)
        if envelope.block is None:
            return deserialize((envelope.head, list(map(bytearray, envelope.inline))))
        block = envelope.block
        area = lease(self.theirs[block], lambda: self._done_with.append(block))  # reports its last use to the sender
        return deserialize((envelope.head, [area[start:end] for start, end in envelope.spans]))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def send_if_open(channel: ShmChannel, message: Message) -> None:
    """Send a message, ignoring a closed connection: the receiving thread reports that."""
    with contextlib.suppress(OSError):
        channel.send(message)
