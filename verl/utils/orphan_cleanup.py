"""Clean-up after a killed process: a small process beside it removes files and ends processes that it left.

    owner ── pipe ──> clean-up process        registered before it is made: directory, shared memory, process group
      │ SIGKILL          │ end of file
      ✗                  └──> SIGKILL to the groups, stopped processes too ──> files and shared memory removed ──> exit

No handler runs in a process that is killed, and a child that would tidy up may be killed or stopped as well. The
clean-up process is in a session of its own, so that no signal to the owner's group reaches it. It needs about 10 MiB,
is started with the first registration, and ends with its owner.

This file is also that process's program: it imports the standard library alone.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
CHECK_EVERY_S = 0.5
KILL_TIMEOUT_S = 20.0


class OrphanCleanup:
    """The clean-up process of this process, as the one that registers with it; see `register`."""

    def __init__(self):
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self.process: subprocess.Popen[bytes] | None = None

    def register(
        self,
        *,
        directories: Sequence[str | Path] = (),
        shared_memory: Sequence[str] = (),
        process_groups: Sequence[int] = (),
        environment: Sequence[str] = (),
        last_words: Mapping[int, str] | None = None,
    ) -> int:
        """Register files (before they are made) and processes to remove and end after this process ends.

        Args:
            directories: with all that is in them; need not exist.
            shared_memory: how the names of files in /dev/shm begin.
            process_groups: of processes that this process started.
            environment: entries `NAME=VALUE` that are in the environment of processes to be ended, and of no others.
            last_words: by process id; written to standard error if that process had ended before this one was gone.
                For a library that ends this process without a word when another one has ended.
        Returns:
            A number for `withdraw`.
        """
        entry = {
            "directories": [os.path.abspath(directory) for directory in directories],
            "shared_memory": list(shared_memory),
            "process_groups": list(process_groups),
            "environment": list(environment),
            "last_words": {str(process): text for process, text in (last_words or {}).items()},
        }
        with self._lock:
            number = next(self._numbers)
            try:
                self.process = self.process or _started()
            except OSError as error:
                log.warning("No clean-up process starts (%s): files may be left if this process is killed.", error)
            self._tell(number, entry)
        return number

    def withdraw(self, number: int) -> None:
        """Nothing is left to clean up of a registration. May be called again."""
        with self._lock:
            self._tell(number, None)

    def close(self) -> None:
        """End the clean-up process, which first cleans up what is still registered."""
        with self._lock:
            process, self.process = self.process, None
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):  # what it is to end does not end
                    process.wait(timeout=KILL_TIMEOUT_S)

    def forget(self) -> None:
        """Close the pipe, which must end with the owner, and start anew, in a fork of the owner."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.__init__()

    def _tell(self, number: int, entry: dict[str, Any] | None) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):  # somebody has killed it
                self.process.send_signal(signal.SIGCONT)  # a stopped one would fill the pipe and block this process
                self.process.stdin.write(json.dumps({"number": number, "entry": entry}).encode() + b"\n")


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())],
        stdin=subprocess.PIPE,
        bufsize=0,  # a line that could not be sent is not tried again at the next one
        stdout=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


CLEANUP = OrphanCleanup()  # of this process
atexit.register(CLEANUP.close)
os.register_at_fork(after_in_child=CLEANUP.forget)


def remove_shared_memory(prefix: str) -> None:
    """Remove the files in /dev/shm whose names begin so; nothing for an empty prefix."""
    with contextlib.suppress(OSError):
        for name in os.listdir(SHARED_MEMORY) if prefix else ():
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    (SHARED_MEMORY / name).unlink()


def process_fields(process: int) -> list[str]:
    """Fields of a process in /proc, from its state on; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def members(group: int) -> list[int]:
    """The processes of a group, without zombies."""
    processes = []
    for process in [int(path.name) for path in Path("/proc").glob("[0-9]*")]:
        fields = process_fields(process)
        if fields and int(fields[2]) == group and fields[0] not in "ZX":
            processes.append(process)
    return processes


def kill_group(group: int) -> None:
    """Kill every process of a group, and wait until they have ended. A stopped process is killed like any other."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        if not members(group) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def kill_marked(mark: str) -> None:
    """Kill every process that has an entry `NAME=VALUE` in its environment, and wait until they have ended."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (processes := _marked(mark)) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    """The processes, this one left out, that have a mark in the environment that they were started with."""
    processes = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            if mark.encode() in directory.joinpath("environ").read_bytes().split(b"\0"):
                processes.append(int(directory.name))
    return [process for process in processes if process != os.getpid()]


def clean_up(entry: dict[str, Any]) -> None:
    """End and remove what one registration names."""
    for group in entry["process_groups"]:
        kill_group(group)
    for mark in entry["environment"]:
        kill_marked(mark)
    for prefix in entry["shared_memory"]:
        remove_shared_memory(prefix)
    for directory in entry["directories"]:
        shutil.rmtree(directory, ignore_errors=True)


def main(owner: int) -> None:
    """Receive registrations until the owner ends, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job: the owner decides
        signal.signal(number, signal.SIG_IGN)
    resume_without_parent()
    registered: dict[int, dict[str, Any]] = {}
    for line in _lines_until_gone(owner):
        message = json.loads(line)
        registered.pop(message["number"], None)
        if message["entry"] is not None:
            registered[message["number"]] = message["entry"]
    for process, text in [pair for entry in registered.values() for pair in entry["last_words"].items()]:
        if (process_fields(int(process)) or "X")[0] in "ZX":  # it has ended
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
    for entry in registered.values():
        clean_up(entry)


def resume_without_parent() -> None:
    """Let the kernel continue this process, if it is suspended, when its parent ends; on Linux."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGCONT), 0, 0, 0)  # PR_SET_PDEATHSIG


def _lines_until_gone(owner: int) -> Iterator[bytes]:
    """Lines of the owner, to the end of what it wrote before it was killed."""
    received = b""
    while True:
        is_gone = os.getppid() != owner  # asked before the pipe is read: what is in it then is all
        if not select.select([0], [], [], 0.0 if is_gone else CHECK_EVERY_S)[0]:
            if is_gone:
                return
            continue
        if not (part := os.read(0, 1 << 16)):
            return
        *lines, received = (received + part).split(b"\n")
        yield from lines


if __name__ == "__main__":
    main(int(sys.argv[1]))
