"""Which processes a driver has, read from the system and not from the code under test."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import worker_server

LABORATORY = "TESTS_LABORATORY"  # set for processes that many tests share


def workers_of(driver: int) -> list[int]:
    """Process ids of the worker processes that this driver started and that still run, zombies left out.

    The processes that write checkpoints for a worker are none, nor are those of a laboratory.
    """
    forked = list(worker_server.forked.items()) if driver == os.getpid() else ()  # another thread may start one
    copies = [pid for pid, variables in forked if LABORATORY not in variables and is_running(pid)]
    return sorted([*copies, *_children_of(driver, b"verl.cluster.worker")])


def engines_of(parent: int) -> list[int]:
    """The vLLM engines that a process has started."""
    return _children_of(parent, b"verl.rollout.engine_process.serve")


def _children_of(parent: int, module: bytes) -> list[int]:
    mark, found = f"VERL_PARENT={parent}".encode(), []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            is_module = module in (directory / "cmdline").read_bytes().split(b"\0")
            variables = (directory / "environ").read_bytes().split(b"\0") if is_module else []
            if mark in variables and f"{LABORATORY}=1".encode() not in variables:
                found.append(int(directory.name))
        except OSError:
            continue
    return sorted(found)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Iterable[int], seconds: float = 20.0) -> list[int]:
    """Wait for processes to end; returns those that did not."""
    end = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    return left


def temporary_directories(of: Path) -> list[str]:
    """What clusters keep below a directory for temporary files."""
    return sorted(name for name in os.listdir(of) if name.startswith("verl_"))


def wait_until_removed(paths: Iterable[Path], seconds: float = 20.0) -> None:
    """Wait until none of these exists; fails after a while."""
    end = time.monotonic() + seconds
    while left := [str(path) for path in paths if path.exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.02)
