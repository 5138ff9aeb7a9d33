"""The trainer's side of a process that runs environments: start, requests, replies, attribution of its end.

A process that dies or sends invalid replies is killed with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from verl.environments.base import DeadlinePassed, Fault, InfraError, ToolError, within
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.pool import EXIT_S, PooledChild, StartFailed
from verl.utils.child_process.process import CommandProcess

log = logging.getLogger(__name__)

PROGRAMS = Path(__file__).parent
MAX_REPLY = 16 << 20  # bytes
MAX_PRINTED = 1000  # maximum bytes of a line printed by an environment; longer ones are split
PRINTED_LINES, PRINTED_WITHIN_S = 200, 10.0  # maximum lines of one process in the run's log


class Host(PooledChild):
    """One process that runs environments.

    Args:
        options: the first message.
        python: the interpreter.
        start_s: timeout of its start.
        is_alone: whether it is for one episode only.
        digest: that the file must have; None for any.
    Attributes:
        hung: number of calls past their deadline, whose threads may still run.
        environments: number of environments in it.
        recovery: declared by the class or the file of tools; see `verl.environments.base.Environment`.
        described: value of its first reply.
        digest: of the file of its environment, which it has just loaded; empty for none.
    Raises:
        InfraError: the interpreter cannot be started.
    """

    def __init__(
        self, options: Mapping[str, Any], python: str, start_s: float, is_alone: bool = False, digest: str | None = None
    ):
        output, output_writer = os.pipe()
        try:
            child = CommandProcess([python, str(PROGRAMS / "host_main.py")], output_writer, MAX_REPLY)
        except OSError as error:
            os.close(output)
            raise InfraError(f"{python} cannot be started: {error}") from error
        finally:
            os.close(output_writer)
        super().__init__(child, start_s)
        self.is_alone, self._digest, self.digest = is_alone, digest, ""
        self.hung = self.environments = 0
        self.recovery: Any = None
        self.described: Any = None
        self._ids = itertools.count()
        self._pending: dict[int, tuple[str, Future[dict[str, Any]]]] = {}  # by id: the caller, and its reply
        self._sending = threading.Lock()
        self._why, self._suspects = "", frozenset[str]()
        self._last_line = b""
        self._output = threading.Thread(target=self._log_output, args=(output,), name="environment output", daemon=True)
        self._output.start()
        self._send(options)

    @property
    def is_usable(self) -> bool:
        """Whether it accepts new environments."""
        return not self.hung and super().is_usable

    def await_ready(self) -> None:
        """Wait for the first reply of the process.

        Raises:
            InfraError: the process could not be started or could not load the environment in time.
        """
        try:
            reply = self.first_message()
        except StartFailed as error:
            setting = " (environment.reset_timeout_s)" if isinstance(error.__cause__, TimeoutError) else ""
            raise InfraError(f"it has not started: {error}{setting}{self._last_output()}") from error
        self.recovery, self.described = reply.get("recovery"), _value(reply)
        if (file := reply.get("file")) is not None and Path(file).is_file():
            self.digest = hashlib.blake2b(Path(file).read_bytes()).hexdigest()
        if self._digest not in (None, self.digest):
            raise InfraError(f"{file} was changed during the run. Restore it, or resume the run to play by the new one")
        threading.Thread(target=self._read, name="environment replies", daemon=True).start()

    async def request(self, op: str, caller: str | None = None, *, limit_s: float, **fields: Any) -> Any:
        """Send a request and return the value of the reply.

        Args:
            caller: the environment; None for a call without one.
            limit_s: until the reply.
        Raises:
            InfraError: the process failed, or the call took too long next to others.
            DeadlinePassed: the call took too long in its own process.
            ToolError: the tool raised.
        """
        number = next(self._ids)
        caller = caller or f"call {number}"
        reply: Future[dict[str, Any]] = Future()
        reply.set_running_or_notify_cancel()  # it can no longer be cancelled
        self._pending[number] = caller, reply
        try:
            if self.is_over:
                raise InfraError(self._why, self._fault(caller))

            async def answered() -> dict[str, Any]:
                await asyncio.to_thread(self._send, {"id": number, "op": op, **fields})
                return await asyncio.wrap_future(reply)

            return _value(await within(limit_s, answered()))
        except DeadlinePassed:
            self.hung += 1
            if self.child.is_stopped():
                await asyncio.to_thread(self.end, f"no answer within {limit_s:g} s{self.state()}")
                raise InfraError(self._why, self._fault(caller)) from None
            if not self.is_alone:
                raise InfraError(f"no answer within {limit_s:g} s, next to other episodes", "late") from None
            raise
        finally:
            self._pending.pop(number, None)  # a later reply is ignored

    def end(self, why: str) -> None:
        """Kill the process; pending requests fail with this reason."""
        if not self.is_over:
            self._why, self.is_over = why, True  # a request is pending before it asks whether it is over
            pending = list(self._pending.values())
            self._suspects = frozenset(caller for caller, reply in pending if not reply.done())
            for caller, reply in pending:
                with contextlib.suppress(InvalidStateError):  # answered
                    reply.set_exception(InfraError(self._why, self._fault(caller)))
        super().kill()

    def kill(self) -> None:
        self.end("the environment is closed")

    def _fault(self, caller: str) -> Fault:
        """Fault that the end of the process is for an episode, by its call."""
        if self.is_alone or self._suspects == {caller} or (not self._suspects and self.environments <= 1):
            return "crash"
        return "suspect" if caller in self._suspects or not self._suspects else "neighbour"

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending, contextlib.suppress(ChannelClosed):  # whoever receives finds out how it ended
            self.channel.send(message)

    def _read(self) -> None:
        """Receive replies until the process ends, or sends something else."""
        try:
            while True:
                reply = self.channel.receive()
                if not {"error", "value"} & reply.keys():
                    raise KeyError("value")
                if (found := self._pending.pop(reply["id"], None)) is not None:  # else it comes late
                    found[1].set_result(reply)
        except ChannelClosed:
            why = f"the process of the environment has ended ({self.exit_words()})"
        except ValueError as error:
            why = f"a reply of the environment is not JSON ({error})"
        except Exception as error:  # noqa: BLE001 - of what an environment has written there
            why = f"a reply of the environment is not valid ({type(error).__name__}: {error})"
        self.end(why + self._last_output())

    def _log_output(self, output: int) -> None:
        """Log the lines that its environments print, up to a limit."""
        begun, count = time.monotonic(), 0
        with open(output, "rb") as file:
            for self._last_line in filter(bytes.strip, iter(lambda: file.readline(MAX_PRINTED), b"")):
                if time.monotonic() - begun > PRINTED_WITHIN_S:
                    if count > PRINTED_LINES:
                        left_out = count - PRINTED_LINES
                        log.info("environment %d: %d lines are left out", self.pid, left_out, extra={"console": False})
                    begun, count = time.monotonic(), 0
                count += 1
                if count <= PRINTED_LINES:
                    log.info("environment %d: %s", self.pid, _printable(self._last_line), extra={"console": False})

    def _last_output(self) -> str:
        """The last line that an ended process printed, in parentheses for a message; empty if there is none."""
        self._output.join(EXIT_S)
        line = self._last_line
        return f" (the last line that it wrote: {_printable(line[:300])!r})" if line else ""


def _value(reply: Mapping[str, Any]) -> Any:
    if "error" in reply:
        if reply.get("kind") == "tool":
            raise ToolError(str(reply["error"]))
        raise InfraError(str(reply["error"]), trace=str(reply.get("trace", "")))
    return reply["value"]


def _printable(line: bytes) -> str:
    return "".join(c if c.isprintable() else " " for c in line.decode(errors="replace").rstrip())
