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
from pathlib import Path

from verl.checkpoint.commit.rank_writer import PAGE_BYTES, ImageSource, page_aligned
from verl.errors import CheckpointWriteFailed
from verl.utils.progress import ProgressWatch, report

MOST_ARENAS = 2
ROOM_FACTOR = 1.2  # of a second buffer, that must be free in main memory
HEAD_BYTES = PAGE_BYTES  # the first page says how far the rest is filled
FAILED = -1
POLL_INTERVAL_S = 0.001
WAIT_EVERY_S = 0.5
MADV_POPULATE_WRITE = 23  # Linux 5.14; many page faults at once
POPULATED_BYTES = 64 << 20  # in one call, during which no other thread runs: 0.6 s per GiB were measured

_numbers = itertools.count(1)
_living: weakref.WeakSet[HostBuffer] = weakref.WeakSet()


class HostBuffer:
    """Shared memory without a name: it is gone with the processes that hold it, however they end.

    Allocated as a whole before it is used, since memory that runs out at the first touch ends a process by a signal.

    Attributes:
        number: of this piece of memory; another one after it has grown.
        memory: mapped memory; None before the first allocation.
        before_release: called once before the memory is given back.
    """

    def __init__(self) -> None:
        self.number = 0
        self.fd = -1
        self.num_bytes = 0
        self.memory: mmap.mmap | None = None
        self.before_release: Callable[[], None] | None = None
        _living.add(self)

    def fit(self, num_bytes: int) -> mmap.mmap:
        """Allocate at least this many bytes; the content is lost if it must grow.

        Raises:
            OSError: there is not so much memory.
        """
        if self.memory is None or self.num_bytes < num_bytes:
            self.release()
            size = max(page_aligned(num_bytes), mmap.PAGESIZE)
            self.fd = os.memfd_create("verl-checkpoint", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, size)
                os.posix_fallocate(self.fd, 0, size)
                self.memory = map_shared(self.fd, size)
            except BaseException:
                self.release()
                raise
            self.number, self.num_bytes = next(_numbers), size
        return self.memory

    def release(self) -> None:
        """Give the memory back. Whoever mapped it too keeps it until it unmaps."""
        if self.before_release is not None:
            self.before_release()
            self.before_release = None
        if self.fd >= 0:
            os.close(self.fd)
        # Not closed: a tensor may still view the memory, which is given back with the last of them.
        self.fd, self.num_bytes, self.memory = -1, 0, None


class HostBufferPool:
    """At most two host buffers: one that is being written, one that is being filled."""

    def __init__(self, most: int = MOST_ARENAS):
        self._all = [HostBuffer() for _ in range(most)]
        self._free = list(reversed(self._all))  # taken from the end: the second one is used only when the first is busy
        self._changed = threading.Condition()

    def acquire(self, watch: ProgressWatch | None, num_bytes: int = 0) -> HostBuffer | None:
        """A free one; None where all are in use. A second one beside one that is in use is made only where main memory
        has room for it: otherwise the first is waited for, as if all were in use.

        Args:
            num_bytes: that it is to hold.
            watch: progress of the users of buffers; waits as long as they make progress; None does not wait.
        """
        with self._changed:
            while not self._free or not self._has_room(num_bytes):
                if watch is None or watch.is_overdue:
                    return None
                self._changed.wait(timeout=WAIT_EVERY_S)
            return self._free.pop()

    def _has_room(self, num_bytes: int) -> bool:
        """Whether the next free one can hold so much without taking the memory that this machine needs."""
        shortage = num_bytes - self._free[-1].num_bytes
        if shortage <= 0 or len(self._free) == len(self._all):  # at least one buffer is needed
            return True
        free = free_main_memory()
        return free is None or ROOM_FACTOR * shortage <= free

    def give_back(self, host_buffer: HostBuffer) -> None:
        """Free for the next save. The one whose memory is there already is taken first."""
        with self._changed:
            self._free.append(host_buffer)
            self._free.sort(key=lambda free: free.num_bytes)
            self._changed.notify()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(host_buffer.num_bytes for host_buffer in self._all)

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the memory that is held now."""
        return frozenset(host_buffer.number for host_buffer in self._all if host_buffer.memory is not None)

    def release(self) -> None:
        """Give all memory back."""
        for host_buffer in self._all:
            host_buffer.release()


def note_progress(memory: mmap.mmap, end: int) -> None:
    """Publish to readers that the memory up to `end` is filled, or never will be (FAILED)."""
    with memoryview(memory) as view, view[:8].cast("q") as head:
        head[0] = end


def filling(memory: memoryview, is_filler_alive: Callable[[], bool] = lambda: True) -> ImageSource:
    """Memory that is being filled, here or by another process.

    Waiting raises CheckpointWriteFailed where it will never be full.
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
    """Map memory that another process can map too, all of it now; a forked child does not inherit it."""
    memory = mmap.mmap(fd, num_bytes)
    with contextlib.suppress(OSError):  # neither changes what can be done with it
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


def free_main_memory() -> int | None:
    """Free main memory: what the kernel says, or what is left of the limit of this container."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, int(limit) - int(used)) if limit != "max" else free
    except (OSError, ValueError):
        return free
