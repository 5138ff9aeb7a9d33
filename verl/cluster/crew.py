"""The worker processes of a run: started, connected to the driver, and ended."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from verl.cluster.base import Deadline
from verl.errors import WorkerDied, WorkerHung

START_TIMEOUT_S = 300.0  # of a process, until it connects
BUILD_TIMEOUT_S = 600.0  # of its roles, unless calls are given longer
END_TIMEOUT_S = 5.0
STACK_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 20
LONGEST_SOCKET_PATH = 100  # bytes; Linux allows 107, macOS 103


class Crew:
    """Sibling processes on this machine, numbered by rank.

    Args:
        size: how many.
        num_threads: that each may use.
        logs: directory for what they print; None for one that goes with the run.
    Attributes:
        connections: one per rank, once `start` has returned.
    """

    def __init__(self, size: int, num_threads: int, logs: Path | None):
        self.size, self.num_threads = size, num_threads
        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = _short_directory()
        self._logs = self._directory if logs is None else logs
        self._logs.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start every process and wait until all have connected.

        Raises:
            WorkerDied: one of them ended before it connected, or took too long.
        """
        key = secrets.token_bytes(32)
        address = str(self._directory / "driver")
        with Listener(address, family="AF_UNIX", backlog=self.size, authkey=key) as listener:
            for rank in range(self.size):
                self._processes.append(self._spawn(rank, address, key))
            arrived = self._accept_all(listener)
        self.connections = [arrived[rank] for rank in range(self.size)]

    def death(self, rank: int, call: str, step: int | None) -> WorkerDied:
        """How a process ended, with the last lines that it printed."""
        try:
            code = self._processes[rank].wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerDied(rank, call, step, "the process does not answer")
        return WorkerDied(rank, call, step, f"the process ended with {_ending(code)}\n{self._tail(rank)}")

    def silence(self, ranks: Sequence[int], call: str, step: int | None, timeout_s: float) -> WorkerHung:
        """Who of those that do not answer is to blame: first a process that does not react at all."""
        said = {rank: self._log_size(rank) for rank in ranks}
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR2)
        deadline = Deadline(STACK_TIMEOUT_S)
        silent = list(ranks)
        while silent and deadline.left_s:
            time.sleep(0.1)
            silent = [rank for rank in silent if self._log_size(rank) == said[rank]]
        waited = f"no answer within {timeout_s:g} s"
        if silent:
            return WorkerHung(silent[0], call, step, f"{waited}, and the process does not react at all")
        where = [f"rank {rank} stands at:\n{self._tail(rank, said[rank])}" for rank in ranks]
        return WorkerHung(ranks[0], call, step, "\n".join([waited, *where]))

    def kill(self) -> None:
        """End every process at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def end(self) -> None:
        """Give the processes time to end by themselves, then make them; leave nothing behind. May be called again."""
        deadline = Deadline(END_TIMEOUT_S)
        for process in self._processes:
            try:
                process.wait(timeout=deadline.left_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self, rank: int, address: str, key: bytes) -> subprocess.Popen[bytes]:
        package_root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": str(self.num_threads),
            "VERL_RENDEZVOUS": f"file://{self._directory / 'rendezvous'}",
            "VERL_WORKER_ADDRESS": address,
            "VERL_WORKER_KEY": key.hex(),
            "VERL_WORKER_PARENT": str(os.getpid()),
        }
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine: no need to resolve its name
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "verl.cluster.worker"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _accept_all(self, listener: Listener) -> dict[int, Connection]:
        """The connection of each rank; a worker that dies before it connects is named."""
        arrived: dict[int, Connection] = {}
        done = threading.Event()

        def accept() -> None:
            while len(arrived) < self.size:
                try:
                    connection = listener.accept()
                    arrived[connection.recv()] = connection
                except (AuthenticationError, EOFError):  # a stranger at the door: noqa: PERF203
                    continue
                except OSError:  # the listener was closed
                    return
            done.set()

        threading.Thread(target=accept, daemon=True).start()
        deadline = Deadline(START_TIMEOUT_S)
        while not done.wait(timeout=0.1):
            for rank, process in enumerate(self._processes):
                if process.poll() is not None or (rank not in arrived and not deadline.left_s):
                    raise self.death(rank, "start", None)
        return arrived

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"

    def _log_size(self, rank: int) -> int:
        try:
            return self._log(rank).stat().st_size
        except OSError:
            return 0

    def _tail(self, rank: int, start: int = 0) -> str:
        """The last lines of a worker's log, or what it says from a place on."""
        try:
            lines = self._log(rank).read_bytes()[start:].decode(errors="replace").splitlines()
        except OSError as error:
            return f"(its log cannot be read: {error})"
        return "\n".join(lines if start else lines[-LOG_TAIL_LINES:])


def _short_directory() -> Path:
    """A new directory whose path is short enough for a socket, wherever TMPDIR points."""
    directory = Path(tempfile.mkdtemp(prefix="verl_"))
    if len(str(directory / "driver")) < LONGEST_SOCKET_PATH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="verl_", dir="/tmp"))


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    hint = " (out of memory, if nobody sent it)" if -code == signal.SIGKILL else ""
    names = {int(known): known.name for known in signal.Signals}
    return f"signal {names.get(-code, -code)}{hint}"
