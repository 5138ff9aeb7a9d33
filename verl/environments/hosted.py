"""Environments in processes of their own: a class or functions of the user, gymnasium, textarena, reasoning_gym,
verifiers.

A process that dies, is silent, or sends invalid replies is killed with all of its environments and all processes that
they have started; its episodes are restarted in another process. A process with a hanging call gets no new environments
and is killed after its last one. `CallRecord.fault` says whose failure it was, and `HostPool.own_host` gives an episode
a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import Field, PositiveInt

from verl.component import BuildContext, component
from verl.environments.base import (
    Action,
    Environment,
    EnvironmentDescription,
    EnvironmentFactory,
    Fault,
    InfraError,
    Recovery,
    StepResult,
    ToolError,
)
from verl.environments.tools import Tool, ToolEnvironment
from verl.errors import ConfigError
from verl.utils.child_process import supervisor
from verl.utils.child_process.exit_report import describe_exit, memory_kills
from verl.utils.deadline import DeadlinePassed
from verl.utils.progress import state_of

log = logging.getLogger(__name__)

ADAPTERS = Path(__file__).parent / "adapters"
MAX_LINE = 16 << 20  # bytes of one reply
MAX_PRINTED = 1000  # bytes of a line that an environment prints; longer ones are divided
PRINTED_LINES, PRINTED_WITHIN_S = 200, 10.0  # of one process in the run's log
LOOK_S = 0.5
EXIT_S = 2.0  # for the exit status of a process that has closed its pipes
CLOSE_S = 5.0
MAX_ALONE = 8  # episodes that have a process of their own, for each process of the actor


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
        late: number of replies to such calls.
        environments: number of environments in it.
        recovery: what the class, or the file of tools, says of itself; see `verl.environments.base.Environment`.
    """

    def __init__(self, options: Mapping[str, Any], python: str, is_alone: bool = False):
        self.options, self.python, self.is_alone = options, python, is_alone
        self.hung = self.late = self.environments = 0
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
        command = [self.python, "-I", "-S", supervisor.__file__, self.python, str(ADAPTERS / "host_main.py")]
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
                if call is None or call.reply.done():
                    self.late += 1
                else:
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
    found: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return found


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


class HostPool(EnvironmentFactory):
    """The host processes of one process of the actor.

    Attributes:
        recovery: of its environments: what they say of themselves, else `environment.recovery`.
    """

    def __init__(self, options: HostedDescription):
        self.options = options
        self.recovery: Recovery = options.recovery
        self._hosts: list[Host | None] = [None] * options.num_processes
        self._starting, self._alone = asyncio.Lock(), asyncio.Semaphore(MAX_ALONE)
        self._next = 0
        self._others: set[Host] = set()  # those of one episode, and those that get no new environments
        self._closing: set[asyncio.Task[None]] = set()
        self.described: Any = None

    async def start(self) -> None:
        host = await self.host()
        self._hosts[0] = host
        self.recovery = self.options.recovery_of(host.recovery)

    async def host(self) -> Host:
        """The next host that accepts new environments (round robin)."""
        async with self._starting:
            place = self._next % len(self._hosts)
            self._next += 1
            host = self._hosts[place]
            if host is None or host.is_over or host.hung:
                if host is not None:
                    self._others.add(host)
                    self._end_if_idle(host)
                host = self._hosts[place] = await self._started()
            return host

    async def own_host(self) -> Host:
        """A host for one episode; waits while MAX_ALONE episodes have one."""
        await self._alone.acquire()
        try:
            host = await self._started(is_alone=True)
        except BaseException:
            self._alone.release()
            raise
        self._others.add(host)
        return host

    async def _started(self, is_alone: bool = False) -> Host:
        options = self.options
        host = Host(options.host_options(), options.python or sys.executable, is_alone)
        try:
            self.described = await host.start(options.reset_timeout_s)
        except BaseException:
            await host.close()
            raise
        return host

    def release(self, host: Host) -> None:
        """Called when an environment of a host has ended."""
        host.environments -= 1
        self._end_if_idle(host)
        if host.is_alone:
            self._alone.release()

    def _end_if_idle(self, host: Host) -> None:
        """End a host that gets no new environments once it has none left."""
        if host in self._others and host.environments <= 0 and (host.is_alone or not host.is_waited_for):
            self._others.remove(host)
            task = asyncio.create_task(host.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def make(self) -> Any:
        return HostedEnvironment(self)

    def make_alone(self) -> Any:
        return HostedEnvironment(self, is_alone=True)

    async def stop(self) -> None:
        hosts = [host for host in (*self._hosts, *self._others) if host is not None]
        await asyncio.gather(*(host.close() for host in hosts), *self._closing)
        self._hosts, self._others = [None] * len(self._hosts), set()


class HostedEnvironment(Environment):
    """An environment that lives in a host."""

    numbers = itertools.count()
    keeps_deadlines = True

    def __init__(self, pool: HostPool, is_alone: bool = False):
        self.pool, self.is_alone, self.number = pool, is_alone, next(self.numbers)
        self.host: Host | None = None
        self.is_closed = False
        self.recovery = pool.recovery

    async def acquire_process(self) -> None:
        """Before `reset`: choose, and perhaps start, the process."""
        host = await (self.pool.own_host() if self.is_alone else self.pool.host())
        host.environments += 1
        if self.is_closed:  # while it waited
            self.pool.release(host)
            raise InfraError("the environment was closed before its first call")
        self.host = host

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        plain = {name: value for name, value in row.items() if _is_plain(value)}
        return await self._request("reset", self.pool.options.reset_timeout_s, row=plain, seed=seed)

    async def step(self, action: Action) -> StepResult:
        calls = [dict(vars(call)) for call in action.calls]
        given = {"text": action.text, "calls": calls, "call_id": action.call_id}
        found = await self._request("step", self.pool.options.step_timeout_s, action=given)
        if not isinstance(found, dict):
            raise InfraError(f"a reply of the environment is {str(found)[:80]}: expected an object")
        return StepResult(**found)

    async def close(self) -> None:
        host, self.host, self.is_closed = self.host, None, True
        if host is None:
            return
        try:
            if not host.is_over and not (host.is_alone and host.hung):
                limit_s = self.pool.options.step_timeout_s
                await host.request("close", f"env {self.number}", limit_s=limit_s, env=self.number)
        finally:
            self.pool.release(host)

    async def _request(self, op: str, limit_s: float, **fields: Any) -> Any:
        assert self.host is not None
        return await self.host.request(op, f"env {self.number}", limit_s=limit_s, env=self.number, **fields)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, list, dict, type(None)))


@component
class HostedDescription(EnvironmentDescription):
    """Base of environments in processes of their own.

    Args:
        processes: beside each process of the actor; None: two, or one where there is one core.
        python: the interpreter that runs them, with its own packages; None: this one.
        recovery: of environments that do not say it of themselves, as an attribute of the class or of the file of
            tools; see `verl.environments.base.Environment`.
    """

    has_rewards: ClassVar[bool] = True

    processes: PositiveInt | None = None
    python: str | None = None
    recovery: Recovery = "restart"

    @property
    def num_processes(self) -> int:
        return self.processes or min(2, os.cpu_count() or 1)

    def machine_faults(self) -> Iterator[str]:
        if self.python is not None and not Path(self.python).exists():
            yield f"python is {self.python!r}: there is no such interpreter."

    def recovery_of(self, told: Any) -> Recovery:
        """The recovery of environments that say this of themselves; None where they say nothing.

        Raises:
            ConfigError: it is none, or the configuration says something else.
        """
        kinds = get_args(Recovery)
        if told is not None and told not in kinds:
            raise ConfigError(
                f"environment: recovery of its class is {told!r}: expected {', '.join(kinds)}. Correct it there."
            )
        if told in (None, "restart"):  # which is the default: it is what a subclass of `Environment` has
            return self.recovery
        if self.recovery not in ("restart", told):
            raise ConfigError(
                f"environment.recovery is {self.recovery}, and the environment says of itself that it is {told}. Leave "
                "environment.recovery out, or correct the attribute."
            )
        return told

    def host_options(self) -> dict[str, Any]:
        """The first message to a host."""
        raise NotImplementedError

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return HostPool(self)

    def ask(self, what: str, **options: Any) -> Any:
        """First message of a started process, so that code of the user or a package is not run in this one.

        Args:
            what: the setting that is to blame where it cannot start.
        Raises:
            ConfigError: it does not start.
        """
        try:
            return self._first_reply(options)
        except InfraError as error:
            raise ConfigError(f"environment.{what}: {error}") from error

    def start_faults(self, what: str, **options: Any) -> Iterator[str]:
        """Reasons why a process of the environment cannot start, for `preflight`."""
        try:
            self._first_reply(options)
        except InfraError as error:
            yield f"{what}: {error}"

    def _first_reply(self, options: Mapping[str, Any]) -> Any:
        async def started() -> Any:
            host = Host({**self.host_options(), **options}, self.python or sys.executable)
            try:
                return await host.start(self.reset_timeout_s)
            finally:
                await host.close()

        from verl.http_client.client import EventLoopThread

        thread = EventLoopThread("an environment's description")
        try:
            return thread.wait(thread.begin(started()))
        finally:
            thread.close()


@component
class FunctionEnvironment(HostedDescription):
    """A user's class with `reset(row, seed)` and `step(action)`, coroutines or not; see docs/environments.md.

    Args:
        path: `file.py:Class` or `module:Class`.
        arguments: of its constructor.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "environments.py:MyEnvironment"}

    path: str
    arguments: Mapping[str, Any] = Field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        if not self.path.rpartition(":")[0]:
            yield f"path is {self.path!r}: expected file.py:Class or module:Class."

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        file = self.path.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield f"path is {self.path!r}: there is no file {file}."

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from self.start_faults(f"path is {self.path!r}")

    def host_options(self) -> dict[str, Any]:
        return {"kind": "class", "path": self.path, "arguments": dict(self.arguments)}


@component
class _PackageEnvironment(HostedDescription):
    """Base of environments of a package.

    Attributes:
        names: the field that names one of the package's environments.
    """

    package: ClassVar[str] = ""
    names: ClassVar[str] = "env_id"

    arguments: Mapping[str, Any] = Field(default_factory=dict)

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        if self.python is None and importlib.util.find_spec(self.package) is None:
            yield (
                f"_target_ is {type(self).__name__}: needs the package {self.package}, which is not installed. Install "
                "it, or give environment.python an interpreter that has it."
            )

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from self.start_faults(f"{self.names} is {getattr(self, self.names)!r}", **{"try": "reset"})

    def _options(self, adapter: str, **arguments: Any) -> dict[str, Any]:
        path = f"{ADAPTERS / self.package}_adapter.py:{adapter}"
        return {"kind": "class", "path": path, "arguments": {**arguments, **self.arguments}}


@component
class GymnasiumEnvironment(_PackageEnvironment):
    """An environment of gymnasium whose observations can be read as text.

    Args:
        env_id: such as `FrozenLake-v1`.
        arguments: of `gymnasium.make`.
    """

    example_values: ClassVar[Mapping[str, str]] = {"env_id": "FrozenLake-v1"}
    package: ClassVar[str] = "gymnasium"

    env_id: str

    def host_options(self) -> dict[str, Any]:
        return self._options("Text", env_id=self.env_id)


@component
class TextArenaEnvironment(_PackageEnvironment):
    """A game of textarena for one player.

    Args:
        env_id: such as `GuessTheNumber-v0`.
        arguments: of `textarena.make`.
    """

    example_values: ClassVar[Mapping[str, str]] = {"env_id": "GuessTheNumber-v0"}
    package: ClassVar[str] = "textarena"

    env_id: str

    def host_options(self) -> dict[str, Any]:
        return self._options("Game", env_id=self.env_id)


@component
class ReasoningGymEnvironment(_PackageEnvironment):
    """A task of reasoning_gym: the question of the row's `index`, one answer, and its score.

    Args:
        task: such as `leg_counting`.
        arguments: of `reasoning_gym.create_dataset`.
    """

    example_values: ClassVar[Mapping[str, str]] = {"task": "leg_counting"}
    package: ClassVar[str] = "reasoning_gym"
    names: ClassVar[str] = "task"

    task: str

    def host_options(self) -> dict[str, Any]:
        return self._options("ReasoningTask", task=self.task)


class _VerifiersPool(HostPool):
    async def start(self) -> None:
        await super().start()
        self.tool_parameters = {tool["name"]: tool.get("parameters") or {} for tool in self.described["tools"]}


@component
class VerifiersEnvironment(_PackageEnvironment):
    """Tasks of the package verifiers (0.4), each an environment of one agent, with the tools and rewards that it has.

    Args:
        taskset: the id of verifiers' taskset, which is the name of an installed module.
        paths: directories that are searched for that module too.
        arguments: further configuration of verifiers' environment, such as {agent: {harness: {id: null}}}. Without it,
            the harness is a chat in the environment's process, and the runtime a directory of this machine.
    """

    example_values: ClassVar[Mapping[str, str]] = {"taskset": "my_taskset, the name of an installed module"}
    package: ClassVar[str] = "verifiers"
    names: ClassVar[str] = "taskset"
    FIRST: ClassVar[int] = 1024  # prompts that are asked for with the tools

    taskset: str
    paths: tuple[str, ...] = ()

    def host_options(self) -> dict[str, Any]:
        agent = {"max_turns": self.max_turns, **self.arguments.get("agent", {})}
        taskset = {"id": self.taskset, **self.arguments.get("taskset", {})}
        config = {**self.arguments, "taskset": taskset, "agent": agent}
        paths = [str(Path(path).resolve()) for path in self.paths]
        path = f"{ADAPTERS / self.package}_adapter.py:VerifiersTask"
        return {"kind": "class", "path": path, "arguments": {"config": config, "paths": paths}, "describe": 0}

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from ()  # `tool_schemas` asks for a task

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple({"type": "function", "function": tool} for tool in self._described(0)["tools"])

    def prompts(self, count: int) -> Sequence[Sequence[Mapping[str, Any]]]:
        return self._described(count)["prompts"][:count]

    def _described(self, count: int) -> Any:
        count = max(count, self.FIRST)
        return _ask_verifiers(json.dumps(self.host_options(), sort_keys=True), self, count)

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _VerifiersPool(self)


_described: dict[tuple[str, str | None, int], Any] = {}


def _ask_verifiers(options: str, described: VerifiersEnvironment, count: int) -> Any:
    """Asked once: a process takes seconds to import the package."""
    key = options, described.python, count
    if key not in _described:
        _described[key] = described.ask(f"taskset is {described.taskset!r}", describe=count)
    return _described[key]


class _ToolPool(HostPool):
    def __init__(self, options: PythonTools):
        super().__init__(options)
        self.tools: dict[str, Tool] = {}

    async def start(self) -> None:
        await super().start()
        self.tools = self.tools_of(self.host)
        self.tool_parameters = {name: tool.parameters for name, tool in self.tools.items()}

    def tools_of(self, choose: Callable[[], Awaitable[Host]]) -> dict[str, Tool]:
        """The tools by name.

        Args:
            choose: the process of a call.
        """

        def caller(name: str) -> Any:
            async def call(**arguments: Any) -> Any:
                host, limit_s = await choose(), self.options.step_timeout_s
                try:
                    return await host.request("call", limit_s=limit_s, name=name, arguments=arguments)
                finally:
                    self._end_if_idle(host)

            return call

        tools = (Tool(**schema, function=caller(schema["name"]), keeps_deadline=True) for schema in self.described)
        return {tool.name: tool for tool in tools}

    def make(self) -> ToolEnvironment:
        return self._environment(ToolEnvironment(self.tools, self.options.step_timeout_s, self.suffix))

    def make_alone(self) -> ToolEnvironment:
        return self._environment(_ToolsAlone(self))

    @property
    def suffix(self) -> str:
        assert isinstance(self.options, PythonTools)
        return self.options.suffix

    def _environment(self, made: ToolEnvironment) -> ToolEnvironment:
        made.recovery = self.recovery
        return made


class _ToolsAlone(ToolEnvironment):
    """An episode whose tools have a process of their own."""

    def __init__(self, pool: _ToolPool):
        super().__init__(pool.tools_of(self.own_host), pool.options.step_timeout_s, pool.suffix)
        self.pool = pool
        self.host: Host | None = None

    async def acquire_process(self) -> None:
        self.host = await self.pool.own_host()
        self.host.environments += 1

    async def own_host(self) -> Host:
        assert self.host is not None
        return self.host

    async def close(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            self.pool.release(host)


@component
class PythonTools(HostedDescription):
    """Public functions of a user's file as tools: name, arguments by their annotations, docstring.

    Exceptions of a function are shown to the model, except ConnectionError, TimeoutError and MemoryError, which count
    as failures of the infrastructure.

    Args:
        path: `file.py` or `module`.
        suffix: appended to a tool result if the prompt is not a chat.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "tools.py"}
    has_rewards: ClassVar[bool] = False
    has_tools: ClassVar[bool] = True

    path: str
    suffix: str = "\n"

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        if self.path.endswith(".py") and not Path(self.path).is_file():
            yield f"path is {self.path!r}: there is no such file."

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        found = self.ask(f"path is {self.path!r}")
        return tuple({"type": "function", "function": schema} for schema in found)

    def host_options(self) -> dict[str, Any]:
        return {"kind": "tools", "path": self.path}

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _ToolPool(self)
