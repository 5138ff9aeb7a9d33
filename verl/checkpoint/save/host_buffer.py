"""Host buffers: shared memory that a snapshot is copied into and the writer process reads. At most two, reused."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable

from verl.checkpoint.commit.rank_writer import PAGE_BYTES, ImageSource, page_aligned
from verl.errors import CheckpointWriteFailed
from verl.utils.main_memory import free_main_memory
from verl.utils.progress import ProgressWatch, report

MOST_ARENAS = 2
ROOM_FACTOR = 1.2  # main memory that must be free for a second buffer, relative to its size
HEAD_BYTES = PAGE_BYTES  # the first page records how far the rest is filled
FAILED = -1
POLL_INTERVAL_S = 0.001
WAIT_EVERY_S = 0.5
MADV_POPULATE_WRITE = 23  # Linux 5.14; many page faults at once
POPULATED_BYTES = 64 << 20  # per call, during which no other thread runs: 0.6 s per GiB were measured

_numbers = itertools.count(1)
_living: weakref.WeakSet[HostBuffer] = weakref.WeakSet()


class HostBuffer:
    """Anonymous shared memory: freed when the last process that maps it ends, however it ends.

    Allocated in full before use: if memory ran out at the first access to a page, a signal would end the process.

    Attributes:
        number: identifies the current allocation; changes when the buffer grows.
        memory: the mapped memory; None before the first allocation.
        before_release: called once before the memory is freed.
    """

    def __init__(self) -> None:
        self.number = 0
        self.fd = -1
        self.num_bytes = 0
        self.memory: mmap.mmap | None = None
        self.before_release: Callable[[], None] | None = None
        _living.add(self)

    def fit(self, num_bytes: int) -> mmap.mmap:
        """Allocate at least `num_bytes` bytes; the content is lost if the buffer has to grow.

        Raises:
            CheckpointWriteFailed: not enough memory.
        """
        if self.memory is None or self.num_bytes < num_bytes:
            self.release()
            size = max(page_aligned(num_bytes), mmap.PAGESIZE)
            self.fd = os.memfd_create("verl-checkpoint", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, size)
                os.posix_fallocate(self.fd, 0, size)
                self.memory = map_shared(self.fd, size)
            except OSError as error:
                self.release()
                what = f"there is no main memory for a copy of {size / 2**20:.1f} MiB"
                raise CheckpointWriteFailed(f"{what} ({error.strerror}); nothing was written") from error
            self.number, self.num_bytes = next(_numbers), size
        return self.memory

    def release(self) -> None:
        """Free the memory. Other processes that mapped it keep it until they unmap it."""
        if self.before_release is not None:
            self.before_release()
            self.before_release = None
        if self.fd >= 0:
            os.close(self.fd)
        # Not closed: a tensor may still be a view of the memory, which is freed with the last view.
        self.fd, self.num_bytes, self.memory = -1, 0, None


class HostBufferPool:
    """At most two host buffers: one is written to disk while the other is filled."""

    def __init__(self, most: int = MOST_ARENAS):
        self._all = [HostBuffer() for _ in range(most)]
        self._free = list(reversed(self._all))  # taken from the end: the second one is used only when the first is busy
        self._changed = threading.Condition()

    def acquire(self, watch: ProgressWatch | None, num_bytes: int = 0) -> HostBuffer | None:
        """A free buffer, or None if all are in use.

        A second buffer is allocated only if main memory has room for it; otherwise this waits for the first one.

        Args:
            num_bytes: size of the content.
            watch: progress of the users of buffers; waits while they make progress; None returns at once.
        """
        with self._changed:
            while not self._free or not self._has_room(num_bytes):
                if watch is None or watch.is_overdue:
                    return None
                self._changed.wait(timeout=WAIT_EVERY_S)
            return self._free.pop()

    def _has_room(self, num_bytes: int) -> bool:
        """Whether the next free buffer can hold `num_bytes` bytes without using memory that this machine needs."""
        shortage = num_bytes - self._free[-1].num_bytes
        if shortage <= 0 or len(self._free) == len(self._all):  # at least one buffer is needed
            return True
        free = free_main_memory()
        return free is None or ROOM_FACTOR * shortage <= free

    def give_back(self, host_buffer: HostBuffer) -> None:
        """Return a buffer to the pool. Buffers with allocated memory are reused first."""
        with self._changed:
            self._free.append(host_buffer)
            self._free.sort(key=lambda free: free.num_bytes)
            self._changed.notify()

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the current allocations."""
        return frozenset(host_buffer.number for host_buffer in self._all if host_buffer.memory is not None)

    def release(self) -> None:
        """Free the memory of all buffers."""
        for host_buffer in self._all:
            host_buffer.release()


def note_progress(memory: mmap.mmap, end: int) -> None:
    """Record for readers that the memory is filled up to offset `end`, or that filling it FAILED."""
    with memoryview(memory) as view, view[:8].cast("q") as head:
        head[0] = end


def filling(memory: memoryview, is_filler_alive: Callable[[], bool] = lambda: True) -> ImageSource:
    """Image source over memory that is being filled, here or by another process.

    Waiting raises CheckpointWriteFailed if it will never be filled.
    """

    def wait(end: int) -> None:
        seen = -1
        while (progress := _progress(memory)) < end:
            if progress != seen:
                seen = progress
                report()
            if progress == FAILED:
                raise CheckpointWriteFailed("the tensors could not be copied; nothing was published")
            if not is_filler_alive():
                raise CheckpointWriteFailed("the trainer ended while it copied the tensors; nothing was published")
            time.sleep(POLL_INTERVAL_S)

    return ImageSource(memory, wait)


def _progress(memory: memoryview) -> int:
    with memory[:8].cast("q") as head:
        return head[0]


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Map shared memory and populate its pages; forked children do not inherit it."""
    memory = mmap.mmap(fd, num_bytes)
    with contextlib.suppress(OSError):  # both are optimizations
        memory.madvise(mmap.MADV_DONTFORK)
        for start in range(0, num_bytes, POPULATED_BYTES):
            memory.madvise(MADV_POPULATE_WRITE, start, min(POPULATED_BYTES, num_bytes - start))
    return memory


def _forget_in_child() -> None:
    """A forked child, such as a data loader's worker, must not keep a trainer's host buffers alive."""
    for host_buffer in list(_living):
        host_buffer.before_release = None
        host_buffer.release()


os.register_at_fork(after_in_child=_forget_in_child)
