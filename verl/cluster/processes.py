"""Roles in sibling processes on this machine, which the driver starts and ends.

    driver ──Call──> rank 0, rank 1, ...      rows divided by tokens
           <─Answer─                          rows joined in their order
                     rank 0 <──gloo/nccl──> rank 1

A worker's exception, and a worker's death, fail the call that was under way with the rank, the call and the step, and
end all workers: their siblings may be waiting for them in a collective operation for ever.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from verl.cluster.base import Deadline, HostDescription
from verl.cluster.dividing import Division
from verl.cluster.worker import READY, Answer, Call, Start
from verl.description import BuildContext
from verl.dispatch import dispatch_of
from verl.errors import WorkerDied, WorkerError

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 20


@dataclass
class _Pending:
    """A call under way: answers come in by rank."""

    name: str
    step: int | None
    future: Future[Any]
    division: Division | None
    joins: bool
    answers: dict[int, Any]


class Processes:
    """Every role in each of `world_size` processes.

    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting.
    """

    def __init__(self, host: HostDescription, context: BuildContext, world_size: int, num_threads: int):
        self.world_size, self.step = world_size, None
        self._types = host.worker_types()
        self._directory = Path(tempfile.mkdtemp(prefix="verl_"))
        self._logs = context.run_dir / "workers" if context.run_dir is not None else self._directory
        self._logs.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._next_number = 0
        self._failure: WorkerError | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        atexit.register(self.close)
        try:
            self._start(host, context, num_threads)
        except BaseException:
            self.close()
            raise

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every process. Its future fails with WorkerError or WorkerDied."""
        dispatch = dispatch_of(self._types[role], method)
        division = Division(args[0], self.world_size) if dispatch.divides else None
        shares = [(part, *args[1:]) for part in division.divide(args[0])] if division else [args] * self.world_size
        pending = _Pending(f"{role}.{method}", self.step, Future(), division, dispatch.joins, {})
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending[number] = pending
        for rank, share in enumerate(shares):
            try:
                self._connections[rank].send(Call(number, role, method, share))
            except OSError:
                break  # the worker is gone: its listener says so
        return pending.future

    def close(self) -> None:
        """End the workers: asked first, then made to. Leaves nothing running; may be called again."""
        atexit.unregister(self.close)
        with self._lock:
            self._failure = self._failure or WorkerError(0, "close", self.step, "the workers were ended")
        for connection in self._connections:
            _send_quietly(connection, None)
        deadline = Deadline(END_TIMEOUT_S)
        for process in self._processes:
            try:
                process.wait(timeout=deadline.left_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, host: HostDescription, context: BuildContext, num_threads: int) -> None:
        key = secrets.token_bytes(32)
        address = str(self._directory / "driver")
        with Listener(address, family="AF_UNIX", backlog=self.world_size, authkey=key) as listener:
            for rank in range(self.world_size):
                self._processes.append(self._spawn(rank, address, key, num_threads))
            arrived = self._accept_all(listener)
        self._connections = [arrived[rank] for rank in range(self.world_size)]
        ready: _Pending = _Pending("start", None, Future(), None, False, {})
        self._pending[READY] = ready
        for rank, connection in enumerate(self._connections):
            own = replace(context, rank=rank, world_size=self.world_size, device=_device(context.device, rank))
            own = replace(own, tokenizer=None)
            payload = pickle.dumps((host, own))
            _send_quietly(connection, Start(tuple(map(os.path.abspath, sys.path)), payload, num_threads))
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()
        ready.future.result(timeout=START_TIMEOUT_S)

    def _spawn(self, rank: int, address: str, key: bytes, num_threads: int) -> subprocess.Popen[bytes]:
        package_root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": str(num_threads),
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
            while len(arrived) < self.world_size:
                try:
                    connection = listener.accept()
                    arrived[connection.recv()] = connection
                except (OSError, EOFError):
                    return
            done.set()

        threading.Thread(target=accept, daemon=True).start()
        deadline = Deadline(START_TIMEOUT_S)
        while not done.wait(timeout=0.1):
            for rank, process in enumerate(self._processes):
                if process.poll() is not None or not deadline.left_s:
                    raise self._death(rank, "start", None)
        return arrived

    def _listen(self, rank: int, connection: Connection) -> None:
        """Take in the answers of one worker until it hangs up."""
        while True:
            try:
                answer: Answer = connection.recv()
            except (EOFError, OSError):
                return self._on_hang_up(rank)
            with self._lock:
                pending = self._pending.get(answer.number)
            if pending is None:
                continue
            if answer.error is not None:
                self._fail(WorkerError(rank, pending.name, pending.step, answer.error))
            else:
                self._take(answer, rank, pending)

    def _take(self, answer: Answer, rank: int, pending: _Pending) -> None:
        with self._lock:
            pending.answers[rank] = answer.result
            if len(pending.answers) < self.world_size or self._pending.pop(answer.number, None) is None:
                return
        answers = [pending.answers[r] for r in range(self.world_size)]
        try:
            joined = pending.division.join(answers) if pending.joins and pending.division else answers[0]
        except Exception as error:
            pending.future.set_exception(error)
        else:
            pending.future.set_result(joined)

    def _on_hang_up(self, rank: int) -> None:
        with self._lock:
            if self._failure is not None:
                return
            oldest = min(self._pending, default=None)
            pending = None if oldest is None else self._pending[oldest]
        name, step = ("idle", self.step) if pending is None else (pending.name, pending.step)
        self._fail(self._death(rank, name, step))

    def _fail(self, failure: WorkerError) -> None:
        """Fail every call under way, and end the workers."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            failed, self._pending = list(self._pending.values()), {}
        for process in self._processes:
            process.kill()
        for pending in failed:
            pending.future.set_exception(failure)

    def _death(self, rank: int, call: str, step: int | None) -> WorkerDied:
        process = self._processes[rank]
        try:
            code = process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerDied(rank, call, step, "the process does not answer")
        tail = "\n".join(self._log(rank).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return WorkerDied(rank, call, step, f"the process ended with {_ending(code)}\n{tail}")

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    hint = " (out of memory, if nobody sent it)" if -code == signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


def _device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device.startswith("cuda") else device


def _send_quietly(connection: Connection, message: Any) -> None:
    try:
        connection.send(message)
    except OSError:
        pass  # the worker is gone: its listener says so
