"""The trainer's side of a process that runs environments: its start, requests, replies, and whose failure its end was.

A process that dies, is silent, or sends invalid replies is killed with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from verl.environments.base import DeadlinePassed, Fault, InfraError, ToolError
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.process import CommandProcess
from verl.utils.progress import state_of

log = logging.getLogger(__name__)

PROGRAMS = Path(__file__).parent
MAX_REPLY = 16 << 20  # bytes
MAX_PRINTED = 1000  # bytes of a line that an environment prints; longer ones are divided
PRINTED_LINES, PRINTED_WITHIN_S = 200, 10.0  # of one process in the run's log
POLL_INTERVAL_S = 0.5
EXIT_S = 2.0  # for the exit status of a process that has closed its connection


class _HostCall(Future):
    """A request, whose result is the reply.

    Args:
        thread: name of the thread that carries it out.
    """

    def __init__(self, thread: str, limit_s: float):
        super().__init__()
        self.thread, self.limit_s = thread, limit_s
        self.set_running_or_notify_cancel()  # from now on nobody can cancel it


class Host:
    """One process that runs environments.

    Args:
        options: the first message.
        python: the interpreter.
        start_s: limit of its start.
        is_alone: it is for one episode.
    Attributes:
        hung: number of calls past their deadline, whose threads may still run.
        environments: number of environments in it.
        recovery: what the class, or the file of tools, says of itself; see `verl.environments.base.Environment`.
        described: value of its first reply.
    Raises:
        InfraError: the interpreter cannot be started.
    """

    def __init__(self, options: Mapping[str, Any], python: str, start_s: float, is_alone: bool = False):
        self.is_alone, self._start_s = is_alone, start_s
        self.hung = self.environments = 0
        self.is_over = False
        self.recovery: Any = None
        self.described: Any = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, _HostCall] = {}
        self._sending = threading.Lock()
        self._why, self._suspects = "", frozenset[str]()
        self._polled_at, self._silent_s = time.monotonic(), 0.0
        output, output_writer = os.pipe()
        try:
            self._child = CommandProcess([python, str(PROGRAMS / "host_main.py")], output_writer, MAX_REPLY)
        except OSError as error:
            os.close(output)
            raise InfraError(f"{python} cannot be started: {error}") from error
        finally:
            os.close(output_writer)
        self._started = self._expect(0, "MainThread", start_s)
        self._printed = _PrintedLines(output, self._child.pid)
        threading.Thread(target=self._read, name="environment replies", daemon=True).start()
        self._send({**options, "limit_s": start_s})

    @property
    def is_usable(self) -> bool:
        """Whether it gets new environments."""
        return not self.is_over and not self.hung

    def await_ready(self) -> None:
        """Wait for its first reply.

        Raises:
            InfraError: it could not be started, or could not load the environment, or not in time.
        """
        reply = self._started.result()
        if reply.get("late"):
            raise InfraError(f"it has not started within {self._start_s:g} s (environment.reset_timeout_s)")
        self.recovery, self.described = reply.get("recovery"), self._value(reply, self._start_s)

    async def request(self, op: str, thread: str | None = None, *, limit_s: float, **fields: Any) -> Any:
        """Send a request and return the value of the reply.

        Args:
            thread: name of the thread that carries it out; None for one of its own.
            limit_s: in which the process was able to run; measured there.
        Raises:
            InfraError: the process failed, or the call took too long beside others.
            DeadlinePassed: the call took too long in a process of its own.
            ToolError: the tool raised.
        """
        number = next(self._ids)
        thread = thread or f"call {number}"
        if self.is_over:
            raise InfraError(self._why, self._fault(thread))
        call = self._expect(number, thread, limit_s)
        try:
            await asyncio.to_thread(self._send, {"id": number, "op": op, "limit_s": limit_s, **fields})
            return self._value(await asyncio.wrap_future(call), limit_s)
        finally:
            self._waiting.pop(number, None)  # a reply that comes later belongs to nobody

    def end(self, why: str) -> None:
        """End the process; pending requests fail with this reason."""
        pending = [call for call in list(self._waiting.values()) if not call.done()]
        if not self.is_over:
            self.is_over, self._why, self._suspects = True, why, frozenset(call.thread for call in pending)
        for call in pending:
            with contextlib.suppress(Exception):  # answered meanwhile
                call.set_exception(InfraError(self._why, self._fault(call.thread)))

    def kill(self) -> None:
        """End the process and wait until it is gone."""
        self.end("the environment is closed")
        self._child.kill()

    def _fault(self, thread: str) -> Fault:
        """Fault that the end of the process is for the episode whose call a thread carries out."""
        if self.is_alone or self._suspects == {thread} or (not self._suspects and self.environments <= 1):
            return "crash"
        return "suspect" if thread in self._suspects or not self._suspects else "neighbour"

    def _value(self, reply: Mapping[str, Any], limit_s: float) -> Any:
        if reply.get("late"):
            self.hung += 1
            if not self.is_alone:
                raise InfraError(f"no answer within {limit_s:g} s, beside other episodes", "late")
            if reply.get("stalled"):
                raise InfraError(f"no answer within {limit_s:g} s, and its process could not run all that time")
            raise DeadlinePassed(limit_s)
        if "error" in reply:
            if reply.get("kind") == "tool":
                raise ToolError(str(reply["error"]))
            raise InfraError(str(reply["error"]), trace=str(reply.get("trace", "")))
        return reply["value"]

    def _expect(self, number: int, thread: str, limit_s: float) -> _HostCall:
        call = self._waiting[number] = _HostCall(thread, limit_s)
        return call

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending, contextlib.suppress(ChannelClosed):  # `_read` finds out how it ended
            self._child.channel.send(message)

    def _read(self) -> None:
        """Receive replies until the process ends, is silent for too long, or sends something else."""
        try:
            while True:
                self._receive(self._child.channel.receive(self._check_alive))
        except ChannelClosed as error:
            self._child.await_exit(EXIT_S)
            self._printed.thread.join(EXIT_S)
            why = f"the process of the environment has ended ({self._child.describe_exit() or error})"
        except TimeoutError as error:
            why = str(error)
        except ValueError as error:
            why = f"a reply of the environment is not JSON ({error})"
        except Exception as error:  # noqa: BLE001 - of what an environment has written there
            why = f"a reply of the environment is not valid ({type(error).__name__}: {error})"
        self.end(why + self._printed.last())
        self._child.kill()

    def _receive(self, reply: dict[str, Any]) -> None:
        if "id" in reply and not {"late", "error", "value"} & reply.keys():
            raise KeyError("value")
        if (call := self._waiting.pop(reply.get("id", -1), None)) is not None:  # else it comes late, or is a beat
            call.set_result(reply)

    def _check_alive(self, num_bytes: int) -> None:
        """Raise TimeoutError where the process gives no sign of life for as long as its calls may take."""
        now = time.monotonic()
        gap_s, self._polled_at = now - self._polled_at, now
        if num_bytes or gap_s > 2 * POLL_INTERVAL_S:  # or this process itself did not run
            self._silent_s = 0.0
            return
        self._silent_s += gap_s
        if self._silent_s > max((call.limit_s for call in list(self._waiting.values())), default=float("inf")):
            why = f"the process of the environment has given no sign of life for {self._silent_s:.0f} s"
            raise TimeoutError(f"{why} ({state_of(self._child.pid)})")


class _PrintedLines:
    """Lines that environments of one process print: into the run's log, with a limit, and the last one for messages."""

    def __init__(self, output: int, pid: int):
        self._last, self._part = b"", b""
        self._begun, self._count = time.monotonic(), 0
        self.thread = threading.Thread(target=self._read, args=(output, pid), name="environment output", daemon=True)
        self.thread.start()

    def _read(self, output: int, pid: int) -> None:
        with open(output, "rb", buffering=0) as file:
            while chunk := file.read(1 << 16):
                self.add(pid, chunk)

    def add(self, pid: int, chunk: bytes) -> None:
        chunk = self._part + chunk
        lines = [
            line[at : at + MAX_PRINTED] for line in chunk.split(b"\n") for at in range(0, len(line) or 1, MAX_PRINTED)
        ]
        self._part = lines.pop()
        now = time.monotonic()
        if now - self._begun > PRINTED_WITHIN_S:
            if self._count > PRINTED_LINES:
                left_out = self._count - PRINTED_LINES
                log.info("environment %d: %d lines are left out", pid, left_out, extra={"console": False})
            self._begun, self._count = now, 0
        lines = list(filter(bytes.strip, lines))
        for line in lines[: max(0, PRINTED_LINES - self._count)]:
            log.info("environment %d: %s", pid, _printable(line), extra={"console": False})
        self._count += len(lines)
        self._last = lines[-1] if lines else self._last

    def last(self) -> str:
        """The last line in parentheses, for a message; empty if there is none."""
        return f" (the last line that it wrote: {_printable(self._last[:300])!r})" if self._last else ""


def _printable(line: bytes) -> str:
    return "".join(c if c.isprintable() else " " for c in line.decode(errors="replace").rstrip())
