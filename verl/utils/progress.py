"""Progress of a working process, as a process that waits for it sees it: a counter in shared memory, and a deadline.

    worker:  tensor loaded ─ advance() ─ step made ─ advance() ─ ...    by the thread that works, after each piece
                                 │
                      counter, stage: shared memory without a name
                                 │
    waiter:  ProgressWatch: has the counter changed?  no, for `timeout_s` ──> the process hangs, or is stopped

A limit on total time must be longer than the slowest correct call, so a hanging process would be noticed hours late. A
limit on the time without progress must only be longer than the slowest single piece of work.

`advance` must be called by the thread that does the work. A heartbeat from another thread only shows that the process
exists, which the system reports too, and continues while the work hangs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.utils.orphan_cleanup import process_fields

STARTER_VARIABLE = "VERL_PROGRESS"  # holds a file descriptor, and perhaps a slot: `7:1`
NUM_SLOTS = 16
SLOT_BYTES, STAGE_OFFSET = 256, 8  # of each slot: a counter of 8 bytes, then the stage as UTF-8, zero bytes after it
STAGE_BYTES = SLOT_BYTES - STAGE_OFFSET
STATES = {
    "R": "it is computing",
    "S": "it sleeps or waits for another process",
    "D": "it waits for a disk, a network file system or a device",
    "T": "it is stopped (SIGSTOP or SIGTSTP)",
    "t": "it is stopped by a debugger",
    "Z": "it has ended",
    "X": "it has ended",
}


class Progress:
    """Counters in shared memory, one slot for each process that writes; each slot also names a stage.

    The waiter makes it and hands `fd` to a child (`subprocess.Popen(..., pass_fds=[progress.fd])`), which opens it by
    `Progress.open`. A forked child uses the object itself. The memory has no name: nothing of it remains, however the
    processes end.

    Args:
        num_slots: number of processes that can write, each into a separate slot, so that no increment is lost.
    """

    def __init__(self, num_slots: int = NUM_SLOTS):
        size = num_slots * SLOT_BYTES
        self.fd = nameless_file(size)
        self._map(self.fd, size)

    @classmethod
    def open(cls, source: int | str) -> Progress:
        """The memory of another process.

        Args:
            source: a file descriptor that was inherited, which is owned from now on; or what `path` gave there.
        """
        progress = cls.__new__(cls)
        progress.fd = source if isinstance(source, int) else os.open(source, os.O_RDWR | os.O_CLOEXEC)
        progress._map(progress.fd, os.fstat(progress.fd).st_size)
        return progress

    @property
    def path(self) -> str:
        """Opens the memory in a process that did not inherit it, of the same user, while this one lives; on Linux."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def num_slots(self) -> int:
        """Processes that can write."""
        return len(self._memory) // SLOT_BYTES

    def advance(self, stage: str | None = None, slot: int = 0) -> None:
        """A piece of work is done. About 0.2 microseconds without a stage.

        Args:
            stage: what is done from now on, for messages; kept as it is where none is given.
        """
        if stage is not None:
            text = stage.encode()[:STAGE_BYTES]
            start = slot * SLOT_BYTES + STAGE_OFFSET
            self._memory[start : start + STAGE_BYTES] = text.ljust(STAGE_BYTES, b"\0")
        self._counters[slot * SLOT_BYTES // 8] += 1

    def count(self, slot: int) -> int:
        """Pieces of work so far."""
        return self._counters[slot * SLOT_BYTES // 8]

    def stage(self, slot: int = 0) -> str:
        """Current stage of a slot; empty before the first."""
        start = slot * SLOT_BYTES + STAGE_OFFSET
        return self._memory[start : start + STAGE_BYTES].rstrip(b"\0").decode(errors="ignore")

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if not self._memory.closed:
            self._counters.release()
            self._memory.close()
            os.close(self.fd)

    def __del__(self):
        if hasattr(self, "_counters"):  # it was mapped
            self.close()

    def _map(self, fd: int, size: int) -> None:
        self._memory = mmap.mmap(fd, size)
        self._counters = memoryview(self._memory).cast("Q")


class ProgressWatch:
    """A deadline on the progress of another process: `timeout_s` after the last change of its counter.

    The clock is the waiter's own, and runs only while the waiter looks: a gap between two looks that is longer than
    `poll_interval_s` counts as that much, since the waiter itself was stopped (Ctrl-Z, a suspended machine) or busy.

    Args:
        timeout_s: without progress.
        slots: that count; None for all of them. Progress in any one is progress: processes that work on one thing
            together wait for each other.
        poll_interval_s: how often the waiter means to look, at least.
    """

    def __init__(
        self, progress: Progress, timeout_s: float, slots: Sequence[int] | None = None, poll_interval_s: float = 1.0
    ):
        self.progress, self.timeout_s, self._poll_interval_s = progress, timeout_s, poll_interval_s
        self._slots = range(progress.num_slots) if slots is None else slots
        self.restart()

    def restart(self, timeout_s: float | None = None) -> None:
        """Another piece of work was asked for: the clock starts again, with another limit if one is given."""
        self.timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._counts, self._polled_at, self._idle_s = self._read(), time.monotonic(), 0.0

    @property
    def idle_s(self) -> float:
        """Seconds without progress, as far as the waiter has looked."""
        now, counts = time.monotonic(), self._read()
        self._idle_s += min(now - self._polled_at, self._poll_interval_s)
        if counts != self._counts:
            self._counts, self._idle_s = counts, 0.0
        self._polled_at = now
        return self._idle_s

    @property
    def is_overdue(self) -> bool:
        """Whether there was no progress for `timeout_s`."""
        return self.idle_s >= self.timeout_s

    def describe(self, process_id: int | None = None, setting: str | None = None) -> str:
        """Description of a process that is overdue: `made no progress for 300 s (NAME) at STAGE: it is stopped (...)`.

        Args:
            setting: config path of the limit.
        """
        stage = next((text for slot in self._slots if (text := self.progress.stage(slot))), "")
        state = "" if process_id is None else state_of(process_id)
        limit = f"{self.timeout_s:g} s" + (f" ({setting})" if setting else "")
        return f"made no progress for {limit}" + (f" at: {stage}" if stage else "") + (f"; {state}" if state else "")

    def _read(self) -> list[int]:
        return [self.progress.count(slot) for slot in self._slots]


_reported: tuple[Progress, int] | None = None  # where `report` of this process writes
_of_thread = threading.local()


def report_to(progress: Progress | None, slot: int = 0) -> None:
    """Make `report` of this process advance a slot of this memory from now on; None: nothing."""
    global _reported
    _reported = None if progress is None else (progress, slot)


def report(stage: str | None = None) -> None:
    """Advance the progress of this process, if another one watches it; for code that many kinds of process run.

    As with `Progress.advance`: by the thread that does the work. A process that waits for another may report the
    progress that it sees there.
    """
    target = getattr(_of_thread, "reported", _reported)
    if target is not None:
        progress, slot = target
        progress.advance(stage, slot)


def report_to_starter() -> Progress | None:
    """Make `report` advance the memory that the starter of this process has put into its environment.

    Returns:
        That memory; None where nobody watches.
    """
    source, _, slot = os.environ.pop(STARTER_VARIABLE, "").partition(":")
    if source:
        with contextlib.suppress(OSError, ValueError):  # it was meant for another process
            report_to(progress := Progress.open(int(source)), int(slot or 0))
            return progress
    return None


@contextlib.contextmanager
def reporting_to(progress: Progress, slot: int = 0) -> Iterator[None]:
    """Within, `report` of this thread advances this slot, which another thread of the process watches."""
    before = getattr(_of_thread, "reported", None)
    _of_thread.reported = (progress, slot)
    try:
        yield
    finally:
        if before is None:
            del _of_thread.reported
        else:
            _of_thread.reported = before


def state_of(process_id: int) -> str:
    """State of a process according to the system, as a clause; empty if unknown."""
    fields = process_fields(process_id)
    return STATES.get(fields[0], "") if fields else "it is gone"


def is_stopped(process_id: int) -> bool:
    """Whether a process is stopped by a signal or a debugger, so that it does nothing until it is continued."""
    return state_of(process_id) in (STATES["T"], STATES["t"])


def processor_wait_s(process_id: int) -> float:
    """Seconds for which the main thread of a process was ready to run and had no processor; 0 if unknown."""
    try:
        return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def nameless_file(size: int = 0) -> int:
    """Descriptor of a new file in memory without a name, of zero bytes."""
    descriptor = os.memfd_create("verl", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor
