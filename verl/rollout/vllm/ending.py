"""The end of an engine's processes that do not end by themselves, and of the memory that they share."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

TIMEOUT_S = 20.0
KEEPER = b"multiprocessing.resource_tracker"  # removes memory that processes share, once the last of them is gone


def end_group(group: int) -> None:
    """Kill a group of processes, and let the keeper of what memory they share remove that first."""
    deadline = time.monotonic() + TIMEOUT_S
    while (running := members(group)) and time.monotonic() < deadline:
        for pid in (pid for pid, command in running.items() if KEEPER not in command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def sweep(shared: str) -> None:
    """Remove the memory that the workers of an engine on a CPU share, and that vLLM leaves.

    Args:
        shared: how the names of it begin; empty for none.
    """
    for file in Path("/dev/shm").glob(f"{shared}*") if shared else ():
        file.unlink(missing_ok=True)


def members(group: int) -> dict[int, bytes]:
    """Who runs in a group of processes, with the command line; nobody where the system does not tell."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, its_group = directory.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found[int(directory.name)] = directory.joinpath("cmdline").read_bytes()
    return found
