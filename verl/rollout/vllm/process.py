"""The engine's process as the trainer sees it: started, called, killed; it ends with the trainer, however that ends.

It is started with `subprocess`, not by multiprocessing: it never imports the trainer's main script. What it prints goes
into a file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl.errors import RolloutError
from verl.rollout.vllm.ending import end_group, sweep

END_TIMEOUT_S = 20.0  # an engine of several workers ends them one after another
LOOK_EVERY_S = 0.5
LOG_TAIL_LINES = 20
CONNECTION_VARIABLE, PARENT_VARIABLE = "VERL_ENGINE_CONNECTION", "VERL_ENGINE_PARENT"
CORES_VARIABLE = "VERL_ENGINE_CORES"  # numbers with commas between them
SHARED_VARIABLE = "VERL_ENGINE_SHARED"  # set by the child: how the names of shared memory begin that vLLM leaves
DIRECTORY_VARIABLE = "VERL_ENGINE_DIRECTORY"  # the child removes it when the trainer was killed
FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VERL_RENDEZVOUS")


class EngineDied(RolloutError):
    """The engine's process ended, or did not answer in time."""


@dataclass(frozen=True)
class Start:
    """First message.

    Attributes:
        sys_path: the trainer's, so that what can be imported there can be imported here.
        setting: of the engine.
    """

    sys_path: tuple[str, ...]
    setting: Any


@dataclass(frozen=True)
class Call:
    """A method of the engine, to be carried out."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What became of a call; `error` is what was raised, in one line, `trace` all of it."""

    result: Any = None
    error: str | None = None
    trace: str = ""


class EngineError(RolloutError):
    """The engine answered with an error.

    Args:
        reason: what was raised over there, in one line.
    """

    def __init__(self, reason: str, trace: str = ""):
        self.reason, self.trace = reason, trace
        super().__init__(f"{reason}\n{trace}".rstrip())

    def __reduce__(self):
        return type(self), (self.reason, self.trace)


class EngineProcess:
    """One process with one engine.

    Args:
        setting: of the engine, for the child.
        environment: variables of the child.
        directory: of the trainer, for files that nobody needs after it.
        log: takes what it prints.
    Attributes:
        shared: how the names of the memory begin that its workers share; the engine tells it.
    """

    shared = ""

    def __init__(self, setting: Any, environment: dict[str, str], directory: Path, log: Path):
        self.setting, self.environment, self.directory, self.log = setting, environment, directory, log
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def process_id(self) -> int | None:
        """None while there is no process."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def is_busy(self) -> bool:
        """Whether the process runs and has not answered yet."""
        return self.is_alive() and self._connection is not None and not self._connection.poll(0)

    def has_answered(self, within_s: float) -> bool:
        """Whether `answer` would not wait, since the answer is there or none will come; waits a while for that."""
        return self._connection is None or self._connection.poll(within_s)

    def start(self, timeout_s: float) -> Any:
        """Start the process and the engine in it; returns what the engine tells of itself.

        Raises:
            EngineDied: the process ended, or was not ready in time.
            EngineError: the engine could not be made.
        """
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.rollout.vllm.child"],
                env=self._environment(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        atexit.register(self._leave)
        self._connection = Connection(ours.detach())
        try:
            self._send(Start(tuple(map(os.path.abspath, sys.path)), self.setting))
            return self.answer(timeout_s)
        except BaseException:
            self.kill()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Have a method carried out, and wait for its result.

        Raises:
            EngineDied: the process ended.
            EngineError: the method raised.
        """
        self.send(method, *args)
        return self.answer()

    def send(self, method: str, *args: Any) -> None:
        """Begin a call; `answer` ends it."""
        self._send(Call(method, args))

    def answer(self, timeout_s: float | None = None) -> Any:
        """The result of the call under way."""
        try:
            answer = self._receive(timeout_s)
        except BaseException:  # an answer that nobody waited for must not be taken for the next call's
            self.kill()
            raise
        if answer.error is not None:
            raise EngineError(answer.error, answer.trace)
        return answer.result

    def end(self) -> None:
        """Hang up: it ends by itself, or is made to. May be called again."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it and all that it started, at once."""
        atexit.unregister(self._leave)
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return
        process.kill()
        process.wait()
        end_group(process.pid)
        sweep(self.shared)

    def _leave(self) -> None:
        """Where the trainer ends and nobody has closed the engine: it goes, and its directory with it."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self) -> str:
        """The last lines that the process printed."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(its log cannot be read: {error})"
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _environment(self, fd: int) -> dict[str, str]:
        package_root = str(Path(__file__).resolve().parents[3])
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            CONNECTION_VARIABLE: str(fd),
            PARENT_VARIABLE: str(os.getpid()),
            DIRECTORY_VARIABLE: str(self.directory),
        }
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
        return inherited | self.environment | own

    def _send(self, message: Any) -> None:
        if self._connection is None:
            raise EngineDied("the engine is not running")
        try:
            send(self._connection, message)
        except OSError as error:
            raise self._death() from error

    def _receive(self, timeout_s: float | None) -> Answer:
        assert self._connection is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._connection.poll(LOOK_EVERY_S):
            if not self.is_alive() and not self._connection.poll(0):
                raise self._death()
            if deadline is not None and time.monotonic() > deadline:
                raise EngineDied(f"the engine did not answer within {timeout_s:.0f} s\n{self.log_tail()}")
        try:
            return receive(self._connection)
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> EngineDied:
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=END_TIMEOUT_S)
        ending = "does not answer" if code is None else f"ended with {_ending(code)}"
        return EngineDied(f"the engine's process {ending}; its last lines in {self.log}:\n{self.log_tail()}")


def send(connection: Connection, message: Any) -> None:
    """Send an object by the plain pickler: the connection's own would send tensors as handles, to be fetched later."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """The next object. It is of this run: over a socket pair that nobody else can reach."""
    return pickle.loads(connection.recv_bytes())


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    hint = " (out of memory, if nobody sent it)" if -code == signal.SIGKILL else ""
    names = {int(known): known.name for known in signal.Signals}
    return f"signal {names.get(-code, -code)}{hint}"
