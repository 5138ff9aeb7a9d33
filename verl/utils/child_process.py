"""Child processes: ended whatever state they are in, and ending with their parent even while they are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from verl.utils.progress import is_stopped

_log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0  # a killed process ends at once, unless a disk or a device does not answer
LOOK_EVERY_S = 0.5
PR_SET_PDEATHSIG = 1


def kill(process: subprocess.Popen[bytes], group: bool = False) -> int | None:
    """End a process at once; one that is stopped too. It is not waited for where the kernel does not let it end.

    Args:
        group: with all that it has started; it leads a group of its own.
    Returns:
        How it ended; None where it has not yet.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    try:
        return process.wait(timeout=KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _log.error("process %d was killed and has not ended: a disk or a device does not answer", process.pid)
        return None


def end_with_parent(parent: int, end: Callable[[], object] | None = None) -> None:
    """Let this process end soon after its parent has, in the midst of a computation too, and while it is stopped.

    Args:
        parent: its process id, as the parent gave it.
        end: what ends this process; `os._exit(1)` by default.
    """
    resume_without_parent()
    threading.Thread(target=_end_with, args=(parent, end), name="end with parent", daemon=True).start()


def resume_without_parent() -> None:
    """Let the system continue this process, if it is stopped, when its parent ends: to find that out. On Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


class StoppedTime:
    """How long a process has been stopped: no limit on slow work applies to one that does none.

    Args:
        look_every_s: how often `of` is asked; a longer gap counts as that much, since this process was stopped itself.
    """

    def __init__(self, look_every_s: float):
        self._look_every_s = look_every_s
        self._seconds: dict[int, float] = {}
        self._looked_at: dict[int, float] = {}

    def of(self, process_id: int) -> float:
        """Seconds in a row; 0 for one that goes on."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at.get(process_id, now), 2 * self._look_every_s)
        self._looked_at[process_id] = now
        stopped_s = self._seconds.get(process_id, 0.0) + passed_s if is_stopped(process_id) else 0.0
        self._seconds[process_id] = stopped_s
        return stopped_s


def limit_waits(end: socket.socket, timeout_s: float) -> None:
    """Let each read and write of a socket that blocks fail with BlockingIOError after so long without a byte."""
    seconds = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)


def _end_with(parent: int, end: Callable[[], object] | None) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    if end is not None:
        end()
    os._exit(1)


def children(mark: bytes) -> dict[int, str]:
    """Process ids of the children of this process whose command holds a mark, and their programs' names.

    None where the system does not tell.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
            if parent == os.getpid() and mark in command:
                found[int(entry.name)] = os.path.basename(command.split(b"\0")[0].decode(errors="replace"))
    return found


class StoppedWatch:
    """Ends processes that a library has started for this one, once they have been stopped for too long.

    Such a library waits for them without a limit, and they publish no progress; of their end it takes notice.

    Args:
        processes: by their ids, how to call them.
        timeout_s: see above; the time in which this process itself was stopped does not count.
        setting: config path of it.
    Attributes:
        ended: those that were.
    """

    def __init__(self, processes: Mapping[int, str], timeout_s: float, setting: str):
        self.ended: list[int] = []
        self._processes, self._timeout_s, self._setting = dict(processes), timeout_s, setting
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="stopped_watch", daemon=True).start()

    def close(self) -> None:
        """Leave them alone."""
        self._is_over.set()

    def _look(self) -> None:
        pause_s = min(LOOK_EVERY_S, self._timeout_s / 2)
        stopped = StoppedTime(pause_s)
        while not self._is_over.wait(pause_s):
            for pid, name in self._processes.items():
                if pid not in self.ended and stopped.of(pid) >= self._timeout_s:
                    told = "%s (process %d) has been stopped for %g s (%s), and is ended"
                    _log.error(told, name, pid, self._timeout_s, self._setting)
                    self.ended.append(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
