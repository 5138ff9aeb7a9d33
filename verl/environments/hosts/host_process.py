"""The trainer's side of a process that runs environments: start, requests, replies, attribution of its end.

A process that dies, is silent, or sends invalid replies is killed together with its descendants.
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
MAX_PRINTED = 1000  # maximum bytes of a line printed by an environment; longer ones are split
PRINTED_LINES, PRINTED_WITHIN_S = 200, 10.0  # maximum lines of one process in the run's log
POLL_INTERVAL_S = 0.5
EXIT_S = 2.0  # wait for the exit status of a process that has closed its connection


class _HostCall(Future):
    """A request, as a future of its reply.

    Args:
        thread: name of the thread that executes it.
    """

    def __init__(self, thread: str, limit_s: float):
        super().__init__()
        self.thread, self.limit_s = thread, limit_s
        self.set_running_or_notify_cancel()  # it can no longer be cancelled


class Host:
    """One process that runs environments.

    Args:
        options: the first message.
        python: the interpreter.
        start_s: timeout of its start.
        is_alone: whether it is for one episode only.
    Attributes:
        hung: number of calls past their deadline, whose threads may still run.
        environments: number of environments in it.
        recovery: declared by the class or the file of tools; see `verl.environments.base.Environment`.
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
        """Whether it accepts new environments."""
        return not self.is_over and not self.hung

    def await_ready(self) -> None:
        """Wait for the first reply of the process.

        Raises:
            InfraError: the process could not be started or could not load the environment in time.
        """
        reply = self._started.result()
        if reply.get("late"):
            raise InfraError(f"it has not started within {self._start_s:g} s (environment.reset_timeout_s)")
        self.recovery, self.described = reply.get("recovery"), self._value(reply, self._start_s)

    async def request(self, op: str, thread: str | None = None, *, limit_s: float, **fields: Any) -> Any:
        """Send a request and return the value of the reply.

        Args:
            thread: name of the thread that executes it; None for a new one.
            limit_s: timeout, counting only time in which the process was able to run; measured there.
        Raises:
            InfraError: the process failed, or the call took too long next to others.
            DeadlinePassed: the call took too long in its own process.
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
            self._waiting.pop(number, None)  # a later reply is ignored

    def end(self, why: str) -> None:
        """End the process; pending requests fail with this reason."""
        pending = [call for call in list(self._waiting.values()) if not call.done()]
        if not self.is_over:
            self.is_over, self._why, self._suspects = True, why, frozenset(call.thread for call in pending)
        for call in pending:
            with contextlib.suppress(Exception):  # answered meanwhile
                call.set_exception(InfraError(self._why, self._fault(call.thread)))

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.end("the environment is closed")
        self._child.kill()

    def _fault(self, thread: str) -> Fault:
        """`CallRecord.fault` of the process's end, for the episode whose call runs in this thread."""
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
        with self._sending, contextlib.suppress(ChannelClosed):  # `_read` determines how it ended
            self._child.channel.send(message)

    def _read(self) -> None:
        """Receive replies until the process ends, is silent for too long, or sends an invalid line."""
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
        if (call := self._waiting.pop(reply.get("id", -1), None)) is not None:  # otherwise it is late, or a beat
            call.set_result(reply)

    def _check_alive(self, num_bytes: int) -> None:
        """Raise TimeoutError if the process was silent for as long as its calls may take."""
        now = time.monotonic()
        gap_s, self._polled_at = now - self._polled_at, now
        if num_bytes or gap_s > 2 * POLL_INTERVAL_S:  # or this process itself was suspended
            self._silent_s = 0.0
            return
        self._silent_s += gap_s
        if self._silent_s > max((call.limit_s for call in list(self._waiting.values())), default=float("inf")):
            why = f"the process of the environment has given no sign of life for {self._silent_s:.0f} s"
            raise TimeoutError(f"{why} ({state_of(self._child.pid)})")


class _PrintedLines:
    """Lines printed by environments of one process: logged up to a limit; the last is kept for messages."""

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
