"""Message channel between the driver and a worker: pickles through a socket, tensor bytes through shared memory.

    MessagePacker ──> Message ──ShmChannel.send──> socket: pickle, location of bytes ──> ShmChannel.receive ──> value
                        └──bytes──> shared block ───────────────────────────────────────────> its tensors lie here

Shared blocks are reused, since touching a page for the first time costs several times what copying it does. They are
anonymous files passed on as open descriptors: nothing with a name is left behind, whoever is killed. The receiver says
in its next message which blocks it has done with.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.cluster.serialization import RowSelection, Serialized, deserialize, serialize
from verl.utils.child_process.channel import Channel

FREE_BLOCKS_KEPT = 12
WASTE = 4  # a block is not used for what needs less than so small a part of it
ALIGNMENT = 64  # bytes: where a tensor may begin


@dataclass(eq=False)
class ShmBlock:
    """A piece of memory.

    Attributes:
        number: of no other block of this process.
        descriptor: of the file that is shared; None for memory of this process alone.
        holders: who must give it back before it is used again.
    """

    number: int
    size: int
    memory: mmap.mmap
    descriptor: int | None
    holders: int = 0


class ShmBlockPool:
    """Blocks of memory, handed out and used again.

    Args:
        shared: other processes are to read them.
    """

    def __init__(self, *, shared: bool):
        self._shared = shared
        self._lock = threading.RLock()  # a block may be given back by the garbage collector, in the midst of `take`
        self._all: dict[int, ShmBlock] = {}  # the last one used at the end
        self._made = 0

    def take(self, size: int, holders: int = 1) -> ShmBlock:
        """A block of at least this many bytes, with arbitrary content."""
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
        """Release all blocks; blocks that another process still reads are freed when it is done."""
        with self._lock:
            for block in self._all.values():
                self._end(block)
            self._all.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content, whose memory is reused once it is garbage."""
        size = dtype.itemsize * int(np.prod(shape))
        if size < mmap.PAGESIZE:
            return torch.empty(shape, dtype=dtype)
        block = self.take(size)
        area = lease(block.memory, lambda number=block.number: self.give_back(number))[:size]
        return torch.frombuffer(area, dtype=dtype).view(shape)

    def _make(self, size: int) -> ShmBlock:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._made += 1
        if not self._shared:
            return ShmBlock(self._made, size, mmap.mmap(-1, size), None)
        descriptor = nameless_file()
        os.ftruncate(descriptor, size)
        return ShmBlock(self._made, size, map_shm_block(descriptor, size), descriptor)

    def _end(self, block: ShmBlock) -> None:
        if block.descriptor is not None:
            os.close(block.descriptor)
            block.descriptor = None


def lease(memory: mmap.mmap, on_end: Callable[[], object]) -> np.ndarray:
    """The bytes of some memory; `on_end` is called when no object uses them any more."""
    area = np.frombuffer(memory, np.uint8)
    weakref.finalize(area, on_end).atexit = False
    return area


def map_shm_block(descriptor: int, size: int) -> mmap.mmap:
    """The memory of a file that is open."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, where the system can
    return mmap.mmap(descriptor, size, flags=flags)


def nameless_file() -> int:
    """Descriptor of an empty file that processes share by inheriting it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("verl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # a system without: in its directory for temporary files
        return os.dup(file.fileno())


SMALL = 2**15  # bytes: tensors that are less together go through the socket


@dataclass(frozen=True)
class Message:
    """A value that is ready to be sent, to as many as it was packed for.

    Attributes:
        head: see `Serialized`.
        inline: the bytes of tensors, where they are few.
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
    done_with: tuple[int, ...]  # blocks of the receiver's
    gone: tuple[int, ...]  # blocks of the sender's


class MessagePacker:
    """Packs what one process sends, into blocks that its receivers share."""

    def __init__(self):
        self.blocks = ShmBlockPool(shared=True)

    def pack(self, value: Any, receivers: int = 1) -> Message:
        """A message to be sent to exactly so many; what it was made of may change from then on.

        Args:
            value: one that is `Serialized` already arrives as what it was made of.
        """
        head, buffers = value if isinstance(value, Serialized) else serialize(value)
        if sum(buffer.nbytes for buffer in buffers) < SMALL:
            return Message(head, [_bytes(buffer) for buffer in buffers])
        spans, end = [], 0
        for buffer in buffers:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + buffer.nbytes
            spans.append((start, end))
        block = self.blocks.take(end, receivers)
        area = np.frombuffer(block.memory, np.uint8)
        for buffer, (start, stop) in zip(buffers, spans, strict=True):
            if isinstance(buffer, RowSelection):
                buffer.write(area[start:stop])
            else:
                area[start:stop] = buffer
        return Message(head, [], block, tuple(spans))

    def close(self) -> None:
        """Free the memory."""
        self.blocks.close()


class ShmChannel:
    """One end of a connection between two processes of this machine.

    One thread sends, and one receives; they may be two.

    Args:
        post: packs what is sent here.
    """

    def __init__(self, channel: Channel, post: MessagePacker):
        self._channel, self._blocks = channel, post.blocks
        self._known: set[int] = set()  # blocks of ours that the other side has open
        self.theirs: dict[int, mmap.mmap] = {}
        self._done_with: deque[int] = deque()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the other side is gone.
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
        """The value of the next message; its tensors may be kept as long as one likes.

        Raises:
            EOFError, OSError: the other side is gone.
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
        area = lease(self.theirs[block], lambda: self._done_with.append(block))  # tells the sender of its last use
        return deserialize((envelope.head, [area[start:end] for start, end in envelope.spans]))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def send_if_open(channel: ShmChannel, message: Message) -> None:
    """Send a message, to somebody who may be gone: who listens to him will notice."""
    with contextlib.suppress(OSError):
        channel.send(message)


def _bytes(buffer: np.ndarray | RowSelection) -> bytes:
    if isinstance(buffer, RowSelection):
        into = np.empty(buffer.nbytes, np.uint8)
        buffer.write(into)
        return into.tobytes()
    return buffer.tobytes()
