"""Worker processes on this machine: started, connected to the driver, checked for equal versions, and ended."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import BinaryIO

from verl.cluster.rpc import Deadline
from verl.errors import ConfigError, WorkerDied, WorkerHung
from verl.utils.child_process import LogExcerpt, StoppedTime, describe_exit, excerpt, kill, log_size, memory_kills
from verl.utils.orphan_cleanup import CLEANUP
from verl.utils.progress import Progress, is_stopped, state_of


def versions() -> dict[str, str]:
    """Those of this process."""
    import torch

    import verl

    return {"python": platform.python_version(), "torch": str(torch.__version__), "verl": verl.__version__}


def refuse_mixed_versions(workers: Sequence[Mapping[str, str]], where: str) -> None:
    """Compare the versions of workers, by rank, with those of this process, the driver.

    Args:
        where: the path of what put the workers where they are.
    Raises:
        ConfigError: one of them has another.
    """
    here = versions()
    for rank, found in enumerate(workers):
        for name, version in found.items():
            if version != here[name]:
                raise ConfigError(
                    f"{where}: rank {rank} has {name} {version}, the driver has {here[name]}. Install the same set "
                    "everywhere, and start the run anew if it was replaced meanwhile."
                )


START_TIMEOUT_S = 300.0  # of a process, until it says that it is there
BUILD_TIMEOUT_S = 600.0  # of its roles without progress, unless calls are given longer
END_TIMEOUT_S = 5.0
STACK_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.1


class Launcher:
    """Sibling processes on this machine, numbered by rank.

    Args:
        size: how many.
        num_threads: that each may use.
        logs: directory for what they print; None keeps it as long as the run lasts.
        stopped_s: how long one may be stopped while it starts.
    Attributes:
        connections: one per rank, once `start` has returned.
        progress: a slot per rank, which each advances as it works.
    """

    def __init__(self, size: int, num_threads: int, logs: Path | None, stopped_s: float = START_TIMEOUT_S):
        self.size, self.num_threads = size, num_threads
        self.connections: list[Connection] = []
        self.progress, self._stopped_s = Progress(num_slots=size), stopped_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._registered: list[int] = []
        self._meeting: BinaryIO | None = None
        self._logs = [_log_file(logs, rank) for rank in range(size)]
        self._memory_kills = memory_kills()

    def start(self) -> None:
        """Start every process and wait until all are there.

        Raises:
            WorkerDied: one of them ended before it was there; WorkerHung: it took too long.
        """
        self._meeting = _meeting_file()
        for rank in range(self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(self._spawn(rank, theirs.fileno()))
            self.connections.append(Connection(ours.detach()))
            self._registered.append(CLEANUP.register(process_groups=[self._processes[rank].pid]))
        self._await_all()

    def death(self, rank: int, call: str, step: int | None) -> WorkerDied:
        """How a process ended, with the lines of its log that may tell why."""
        try:
            code = self._processes[rank].wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerDied(rank, call, step, f"the process does not answer{self._state(rank)}")
        ended = describe_exit(code, self._memory_kills)
        return WorkerDied(rank, call, step, f"the process ended with {ended}\n{self._tail(rank)}")

    def silence(self, ranks: Sequence[int], call: str, step: int | None, timeout_s: float) -> WorkerHung:
        """Who of those that do not answer is to blame: first a process that does not react at all."""
        stacks = self.stacks(ranks)
        waited = f"no answer within {timeout_s:g} s, and "
        if silent := [rank for rank in ranks if not stacks[rank]]:
            rank = next((rank for rank in silent if self.is_stopped(rank)), silent[0])
            stage = f"; its last progress was at: {found}" if (found := self.progress.stage(rank)) else ""
            at_all = f"the process does not react at all{self._state(rank)}{stage}"
            return WorkerHung(rank, call, step, waited + at_all)
        where = [f"rank {rank} stands at:\n{stacks[rank]}" for rank in ranks]
        return WorkerHung(ranks[0], call, step, "\n".join([f"{waited}no progress meanwhile", *where]))

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where the threads of processes stand, by rank; empty of one that does not react."""
        said = {rank: log_size(self._logs[rank].fileno()) for rank in ranks}
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR2)
        deadline = Deadline(STACK_TIMEOUT_S)
        silent = list(ranks)
        while silent and deadline.left_s:
            time.sleep(0.1)
            silent = [rank for rank in silent if log_size(self._logs[rank].fileno()) == said[rank]]
        return {rank: self._text(rank, said[rank]) for rank in ranks}

    def stopped(self, ranks: Sequence[int], time_of: StoppedTime) -> float:
        """Seconds that one of these processes has been stopped."""
        return max((time_of.of(self._processes[rank].pid) for rank in ranks), default=0.0)

    def is_stopped(self, rank: int) -> bool:
        """Whether a process is stopped by a signal, so that it does nothing, and its siblings wait for it."""
        return is_stopped(self._processes[rank].pid)

    def kill(self) -> None:
        """End every process at once; stopped ones too."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            kill(process)

    def end(self) -> None:
        """Give the processes time to end by themselves, then make them; leave nothing behind. May be called again."""
        deadline = Deadline(END_TIMEOUT_S)
        for process in self._processes:
            try:
                process.wait(timeout=deadline.left_s)
            except subprocess.TimeoutExpired:
                kill(process)
        for number in self._registered:
            CLEANUP.withdraw(number)
        for connection in self.connections:
            connection.close()
        for file in (*self._logs, self._meeting):
            if file is not None:
                file.close()
        self.progress.close()

    def _spawn(self, rank: int, connection: int) -> subprocess.Popen[bytes]:
        assert self._meeting is not None
        package_root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": str(self.num_threads),
            "VERL_RENDEZVOUS": f"file:///dev/fd/{self._meeting.fileno()}",
            "VERL_WORKER_CONNECTION": str(connection),
            "VERL_WORKER_PROGRESS": str(self.progress.fd),
            "VERL_WORKER_PARENT": str(os.getpid()),
        }
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine: no need to resolve its name
        return subprocess.Popen(
            [sys.executable, "-m", "verl.cluster.worker"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._logs[rank],
            stderr=subprocess.STDOUT,
            pass_fds=(connection, self._meeting.fileno(), self.progress.fd),
            start_new_session=True,
        )

    def _await_all(self) -> None:
        """Wait for the first message of each; a worker that ends before, or takes too long, is named."""
        waiting, deadline, stopped = list(range(self.size)), Deadline(START_TIMEOUT_S), StoppedTime(LOOK_EVERY_S)
        while waiting:
            wait([self.connections[rank] for rank in waiting], timeout=LOOK_EVERY_S)
            for rank in list(waiting):
                try:
                    if self.connections[rank].poll(0):
                        self.connections[rank].recv()
                        waiting.remove(rank)
                        continue
                except (EOFError, OSError):
                    raise self.death(rank, "start", None) from None
                if self._processes[rank].poll() is not None:
                    raise self.death(rank, "start", None)
                if stopped.of(self._processes[rank].pid) > self._stopped_s:
                    raise WorkerHung(
                        rank, "start", None, f"it was not there after {self._stopped_s:g} s{self._state(rank)}"
                    )
            if waiting and not deadline.left_s:
                detail = (
                    f"it was not there after {START_TIMEOUT_S:g} s{self._state(waiting[0])}\n{self._tail(waiting[0])}"
                )
                raise WorkerHung(waiting[0], "start", None, detail)

    def _state(self, rank: int) -> str:
        found = state_of(self._processes[rank].pid)
        return f": {found}" if found else ""

    def _tail(self, rank: int) -> str:
        """The last lines of a worker's log, without those of libraries that are well."""
        found: LogExcerpt = excerpt(self._logs[rank].fileno())
        return "\n".join(found.lines)

    def _text(self, rank: int, start: int) -> str:
        """What a worker's log says from a place on."""
        fd = self._logs[rank].fileno()
        return os.pread(fd, max(0, log_size(fd) - start), start).decode(errors="replace")


def _log_file(directory: Path | None, rank: int) -> BinaryIO:
    """An empty file for what a worker prints, open for both; without a name where it goes with the run."""
    if directory is None:
        return tempfile.TemporaryFile()  # type: ignore[return-value]
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"rank_{rank}.log").open("w+b")


def _meeting_file() -> BinaryIO:
    """An empty file by which processes that inherit it find each other."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("verl_rendezvous", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()  # type: ignore[return-value]
