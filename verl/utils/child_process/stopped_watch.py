"""Suspended processes: measures for how long, and kills those that a library has started and waits for."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from verl.utils.progress import is_stopped

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class StoppedTime:
    """Measures how long a process has been suspended.

    Args:
        look_every_s: interval of calls of `of`; a longer gap counts as one interval, since this process itself was
            suspended.
    """

    def __init__(self, look_every_s: float):
        self._look_every_s = look_every_s
        self._seconds: dict[int, float] = {}
        self._looked_at: dict[int, float] = {}

    def of(self, process_id: int) -> float:
        """Seconds for which the process has been suspended; 0 if it runs."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at.get(process_id, now), 2 * self._look_every_s)
        self._looked_at[process_id] = now
        stopped_s = self._seconds.get(process_id, 0.0) + passed_s if is_stopped(process_id) else 0.0
        self._seconds[process_id] = stopped_s
        return stopped_s


def children(mark: bytes) -> dict[int, str]:
    """Children of this process whose command line contains a mark: program names by process id.

    Empty if the operating system does not provide them.
    """
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
            if parent == os.getpid() and mark in command:
                processes[int(entry.name)] = os.path.basename(command.split(b"\0")[0].decode(errors="replace"))
    return processes


class StoppedWatch:
    """Kills processes of a library that have been suspended for too long.

    The library waits for them without limit, but notices their end.

    Args:
        processes: names by process id, for messages.
        timeout_s: limit; time in which this process itself was suspended does not count.
        setting: configuration path of the limit.
    Attributes:
        ended: process ids that were killed.
    """

    def __init__(self, processes: Mapping[int, str], timeout_s: float, setting: str):
        self.ended: list[int] = []
        self._processes, self._timeout_s, self._setting = dict(processes), timeout_s, setting
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="stopped_watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()

    def _look(self) -> None:
        pause_s = min(LOOK_EVERY_S, self._timeout_s / 2)
        stopped = StoppedTime(pause_s)
        while not self._is_over.wait(pause_s):
            for pid, name in self._processes.items():
                if pid not in self.ended and stopped.of(pid) >= self._timeout_s:
                    text = "%s (process %d) has been suspended for %g s (%s), and is killed"
                    _log.error(text, name, pid, self._timeout_s, self._setting)
                    self.ended.append(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
