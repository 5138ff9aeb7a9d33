"""Memory that is used again and again: touching a page for the first time costs several times what copying it does.

    block = blocks.take(size)      one that nobody holds any more, or a new one
    blocks.give_back(block)        as often as it was handed out

Shared blocks are files without a name: they end with the last process that has them open, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FREE_BLOCKS_KEPT = 12
WASTE = 4  # a block is not used for what needs less than so small a part of it
ALIGNMENT = 64  # bytes: where a tensor may begin


@dataclass(eq=False)
class Block:
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


class Blocks:
    """Blocks of memory, handed out and used again.

    Args:
        shared: other processes are to read them.
    """

    def __init__(self, *, shared: bool):
        self._shared = shared
        self._lock = threading.RLock()  # a block may be given back by the garbage collector, in the midst of `take`
        self._all: dict[int, Block] = {}  # the last one used at the end
        self._made = 0

    def take(self, size: int, holders: int = 1) -> Block:
        """A block of at least so many bytes, with arbitrary content."""
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
        """One holder has done with a block."""
        with self._lock:
            if (block := self._all.get(number)) is not None:
                block.holders -= 1

    def numbers(self) -> set[int]:
        """Of all blocks that there are."""
        with self._lock:
            return set(self._all)

    def close(self) -> None:
        """Let go of all of them; what somebody else still reads stays until he has done."""
        with self._lock:
            for block in self._all.values():
                self._end(block)
            self._all.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content, whose memory is used again once nobody has it any more."""
        size = dtype.itemsize * int(np.prod(shape))
        if size < mmap.PAGESIZE:
            return torch.empty(shape, dtype=dtype)
        block = self.take(size)
        area = lease(block.memory, lambda number=block.number: self.give_back(number))[:size]
        return torch.frombuffer(area, dtype=dtype).view(shape)

    def _make(self, size: int) -> Block:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._made += 1
        if not self._shared:
            return Block(self._made, size, mmap.mmap(-1, size), None)
        descriptor = _nameless_file()
        os.ftruncate(descriptor, size)
        return Block(self._made, size, mapped(descriptor, size), descriptor)

    def _end(self, block: Block) -> None:
        if block.descriptor is not None:
            os.close(block.descriptor)
            block.descriptor = None


def lease(memory: mmap.mmap, on_end: Callable[[], object]) -> np.ndarray:
    """The bytes of some memory; `on_end` is called when nothing that lies on them is left."""
    area = np.frombuffer(memory, np.uint8)
    weakref.finalize(area, on_end).atexit = False
    return area


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """The memory of a file that is open."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, where the system can
    return mmap.mmap(descriptor, size, flags=flags)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("verl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # a system without: in its directory for temporary files
        return os.dup(file.fileno())
