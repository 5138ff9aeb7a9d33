"""The trainer's side of a process that runs environments: its start, requests, replies, and whose failure its end was.

A process that dies, is silent, or sends invalid replies is killed with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.environments.base import DeadlinePassed, Fault, InfraError, ToolError
from verl.utils.child_process import supervisor
from verl.utils.child_process.process import describe_exit, memory_kills
from verl.utils.progress import state_of

log = logging.getLogger(__name__)

PROGRAMS = Path(__file__).parent
MAX_LINE = 16 << 20  # bytes of one reply
MAX_PRINTED = 1000  # bytes of a line that an environment prints; longer ones are divided
PRINTED_LINES, PRINTED_WITHIN_S = 200, 10.0  # of one process in the run's log
LOOK_S = 0.5
EXIT_S = 2.0  # for the exit status of a process that has closed its pipes
CLOSE_S = 5.0


@dataclass(frozen=True)
class _HostCall:
    """A request whose reply has not come.

    Attributes:
        thread: name of the thread that carries it out.
    """

    reply: asyncio.Future[Any]
    thread: str
    limit_s: float


class Host:
    """One process that runs environments.

    Args:
        options: the first message.
        python: the interpreter.
        is_alone: it is for one episode.
    Attributes:
        hung: number of calls past their deadline, whose threads may still run.
        environments: number of environments in it.
        recovery: what the class, or the file of tools, says of itself; see `verl.environments.base.Environment`.
    """

    def __init__(self, options: Mapping[str, Any], python: str, is_alone: bool = False):
        self.options, self.python, self.is_alone = options, python, is_alone
        self.hung = self.environments = 0
        self.is_over = False
        self.recovery: Any = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, _HostCall] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._pid = 0  # of the environments; `_process` is its supervisor
        self._printed = _PrintedLines()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard, self._why, self._suspects = 0, "", frozenset[str]()
        self._memory_kills = memory_kills()

    async def start(self, limit_s: float) -> Any:
        """Start the process; returns the value of its first reply.

        Raises:
            InfraError: it could not be started, or could not load the environment, at most within `limit_s`.
        """
        pipe = asyncio.subprocess.PIPE
        command = [self.python, "-I", "-S", supervisor.__file__, self.python, str(PROGRAMS / "host_main.py")]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=MAX_LINE,
                start_new_session=True,  # Ctrl-C is the trainer's, which ends its step first; it ends with its stdin
            )
        except OSError as error:
            raise InfraError(f"{self.python} cannot be started: {error}") from error
        call = self._expect(0, "MainThread", limit_s)
        self._tasks = [asyncio.create_task(task) for task in (self._read(), self._read_printed(), self._watch())]
        await self._write({**self.options, "limit_s": limit_s})
        reply = await call.reply
        if reply.get("late"):
            raise InfraError(f"it has not started within {limit_s:g} s (environment.reset_timeout_s)")
        return self._value(reply, limit_s)

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
            await self._write({"id": number, "op": op, "limit_s": limit_s, **fields})
            return self._value(await call.reply, limit_s)
        finally:
            self._waiting.pop(number, None)  # a reply that comes later belongs to nobody

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    def end(self, why: str, thread: str = "") -> None:
        """End the process; pending requests fail with this reason.

        Args:
            thread: that is to blame; every thread that carries out a request, if it is not one of them.
        """
        if not self.is_over:
            threads = frozenset(call.thread for call in self._waiting.values() if not call.reply.done())
            self._suspects = threads & {thread} or threads
            self.is_over, self._why = True, why
        for call in self._waiting.values():
            if not call.reply.done():
                call.reply.set_exception(InfraError(self._why, self._fault(call.thread)))
        pipe = None if self._process is None else self._process.stdin
        if pipe is not None and not pipe.is_closing():
            pipe.transport.abort()  # the supervisor kills all of its processes then

    async def close(self) -> None:
        self.end("the environment is closed")
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            if self._process.returncode is None:
                self._process.kill()
            self._process._transport.close()  # type: ignore[attr-defined]  # or it complains of the loop's end

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
        call = self._waiting[number] = _HostCall(asyncio.get_running_loop().create_future(), thread, limit_s)
        return call

    async def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            pass  # it has ended: `_read` finds out how, and fails the request

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        why = ""
        try:
            while line := await self._process.stdout.readline():
                self._heard += 1
                reply = json.loads(line)
                if "beat" in reply:
                    continue
                if "process" in reply:
                    self._pid = int(reply["process"])
                    continue
                call = self._waiting.pop(reply["id"], None)
                if reply["id"] == 0:
                    self.recovery = reply.get("recovery")
                if not {"late", "error", "value"} & reply.keys():
                    raise KeyError("value")
                if call is not None and not call.reply.done():  # else it comes late
                    call.reply.set_result(reply)
        except Exception as error:  # noqa: BLE001 - of what an environment has written there
            if isinstance(error, ValueError) and "limit" in str(error):
                why = f"a reply of the environment exceeds {MAX_LINE >> 20} MiB"
            elif isinstance(error, json.JSONDecodeError):
                why = f"a reply of the environment is not JSON ({error})"
            else:
                why = f"a reply of the environment is not valid ({type(error).__name__}: {error})"
        if not why:
            await asyncio.wait(self._tasks[1:2], timeout=EXIT_S)  # what it printed last
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), EXIT_S)
            code = self._process.returncode
            how = "its pipe is closed" if code is None else describe_exit(code, self._memory_kills)
            why = f"the process of the environment has ended ({how})"
        self.end(why + self._printed.last())

    async def _read_printed(self) -> None:
        """Pass on what environments print, in pieces, since a line may have any length."""
        assert self._process is not None
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            self._printed.add(self._pid, chunk)

    async def _watch(self) -> None:
        """End the process where it gives no sign of life for as long as its calls may take, and find who is to blame.

        A thread that does not let go of the interpreter is found by its processor time.
        """
        heard, silent_s, before = -1, 0.0, dict[str, float]()
        while not self.is_over:
            begin = time.monotonic()
            await asyncio.sleep(LOOK_S)
            took_s = time.monotonic() - begin
            if self._heard != heard or took_s > 2 * LOOK_S:  # or this process itself did not run
                heard, silent_s, before = self._heard, 0.0, _thread_seconds(self._pid)
                continue
            silent_s += took_s
            limit_s = max((call.limit_s for call in self._waiting.values()), default=float("inf"))
            if silent_s > limit_s:
                spent = {name: s - before.get(name, 0.0) for name, s in _thread_seconds(self._pid).items()}
                busiest = max(spent, key=lambda name: spent[name], default="")
                holds = bool(busiest) and spent[busiest] > silent_s / 10
                state = "a thread does not let go of the interpreter" if holds else state_of(self._pid)
                why = f"the process of the environment has given no sign of life for {silent_s:.0f} s ({state})"
                self.end(why + self._printed.last(), busiest if holds else "")


def _thread_seconds(pid: int) -> dict[str, float]:
    """Processor time of each named thread of a process; empty where the system does not tell."""
    seconds: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            seconds[name] = seconds.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return seconds


class _PrintedLines:
    """Lines that environments of one process print: into the run's log, with a limit, and the last one for messages."""

    def __init__(self) -> None:
        self._last, self._part = b"", b""
        self._begun, self._count = time.monotonic(), 0

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
