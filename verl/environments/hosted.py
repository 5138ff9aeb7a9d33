"""Environments in processes of their own: a class or functions of the user, gymnasium, textarena, reasoning_gym,
verifiers.

A process that dies, or sends invalid replies, is killed with all of its environments, and their episodes are restarted
in another process. A process with a hanging call gets no new environments and is killed after its last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import Field, PositiveInt

from verl.component import BuildContext, component
from verl.environments.base import (
    Action,
    Environment,
    EnvironmentDescription,
    EnvironmentFactory,
    InfraError,
    Recovery,
    StepResult,
    ToolError,
)
from verl.environments.tools import Tool, ToolEnvironment
from verl.errors import ConfigError

log = logging.getLogger(__name__)

ADAPTERS = Path(__file__).parent / "adapters"
MAX_LINE = 16 << 20  # bytes of one reply
ERROR_LINES = 8


class Host:
    """One process that runs environments.

    Attributes:
        hung: number of calls past their deadline, whose threads may still run.
        late: number of replies to such calls.
        environments: number of environments in it.
        recovery: what the class, or the file of tools, says of itself; see `verl.environments.base.Environment`.
    """

    def __init__(self, options: Mapping[str, Any], python: str):
        self.options, self.python = options, python
        self.hung = self.late = self.environments = 0
        self.is_over = False
        self.recovery: Any = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._errors: deque[str] = deque(maxlen=ERROR_LINES)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Any:
        """Start the process; returns its first message.

        Raises:
            InfraError: it could not be started, or could not load the environment.
        """
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            self.python,
            str(ADAPTERS / "host_main.py"),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MAX_LINE,
            start_new_session=True,  # Ctrl-C is the trainer's, which ends its step first; it ends with its stdin
        )
        future = self._expect(0)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]
        await self._write(self.options)
        return await future

    async def request(self, op: str, **fields: Any) -> Any:
        """Send a request and return the reply.

        Raises:
            InfraError: the process failed.
            ToolError: the tool raised.
        """
        if self.is_over:
            raise InfraError(f"the process of the environment has ended{self._last_words()}")
        number = next(self._ids)
        future = self._expect(number)
        try:
            await self._write({"id": number, "op": op, **fields})
            return await future
        finally:
            self._waiting.pop(number, None)  # a reply that comes later belongs to nobody

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    def end(self, why: str) -> None:
        """Kill the process; pending requests fail with this reason."""
        self.is_over = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(InfraError(why))
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        self.end("the environment is closed")
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._process.wait(), 5.0)
            self._process._transport.close()  # type: ignore[attr-defined]  # or it complains of the loop's end

    def _expect(self, number: int) -> asyncio.Future[Any]:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return future

    async def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise InfraError(f"the process of the environment has ended{self._last_words()}") from error

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        why = "the process of the environment has ended"
        try:
            while line := await self._process.stdout.readline():
                reply = json.loads(line)
                future = self._waiting.get(reply["id"])
                if reply["id"] == 0:
                    self.recovery = reply.get("recovery")
                if future is None or future.done():
                    self.late += 1
                elif "error" in reply:
                    kind = ToolError if reply.get("kind") == "tool" else InfraError
                    future.set_exception(kind(reply["error"]))
                else:
                    future.set_result(reply["value"])
        except ValueError as error:  # JSON, or a line beyond the limit
            too_long = "chunk" in str(error) or "limit" in str(error)
            why = (
                f"a reply of the environment exceeds {MAX_LINE >> 20} MiB"
                if too_long
                else f"a reply of the environment is not JSON ({error})"
            )
        except (KeyError, TypeError) as error:
            why = f"a reply of the environment has no {error}"
        self.end(why + self._last_words())

    async def _read_errors(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            while line := await self._process.stderr.readline():
                self._errors.append(line.decode(errors="replace").rstrip()[:300])

    def _last_words(self) -> str:
        return f" (the last line that it wrote: {self._errors[-1]!r})" if self._errors else ""


class HostPool(EnvironmentFactory):
    """The host processes of one process of the actor.

    Attributes:
        recovery: of its environments: what they say of themselves, else `environment.recovery`.
    """

    def __init__(self, options: HostedDescription):
        self.options = options
        self.recovery: Recovery = options.recovery
        self._hosts: list[Host | None] = [None] * options.processes
        self._starting = asyncio.Lock()
        self._next = 0
        self._old: list[Host] = []
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
                if host is not None and not host.is_over:
                    self._retire(host)
                host = Host(self.options.host_options(), self.options.python or sys.executable)
                self.described = await host.start()
                self._hosts[place] = host
            return host

    def _retire(self, host: Host) -> None:
        self._old.append(host)
        self.end_if_idle(host)

    def released(self, host: Host) -> None:
        """Called when an environment of a host has ended."""
        host.environments -= 1
        self.end_if_idle(host)

    def end_if_idle(self, host: Host) -> None:
        """Kill a host with hanging calls once it has no environments left."""
        if host in self._old and host.environments <= 0 and not host.is_waited_for:
            self._old.remove(host)
            host.end("its calls hang")

    async def abandon(self, environment: Any) -> None:
        if isinstance(environment, HostedEnvironment) and environment.host is not None:
            environment.host.hung += 1

    def make(self) -> Any:
        return HostedEnvironment(self)

    async def stop(self) -> None:
        for host in [*self._hosts, *self._old]:
            if host is not None:
                await host.close()
        self._hosts, self._old = [None] * len(self._hosts), []


class HostedEnvironment(Environment):
    """An environment that lives in a host."""

    numbers = itertools.count()

    def __init__(self, pool: HostPool):
        self.pool, self.host, self.number = pool, None, next(self.numbers)
        self.host: Host | None = None
        self.recovery = pool.recovery

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.host = await self.pool.host()
        self.host.environments += 1
        plain = {name: value for name, value in row.items() if _is_plain(value)}
        return await self.host.request("reset", env=self.number, row=plain, seed=seed)

    async def step(self, action: Action) -> StepResult:
        assert self.host is not None
        calls = [dict(vars(call)) for call in action.calls]
        found = await self.host.request(
            "step", env=self.number, action={"text": action.text, "calls": calls, "call_id": action.call_id}
        )
        try:
            return StepResult(
                found["observation"],
                found.get("reward") or 0.0,
                bool(found.get("terminated")),
                bool(found.get("truncated")),
                found.get("info") or {},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InfraError(f"step gave {str(found)[:80]}: expected observation, reward, terminated, ...") from error

    async def close(self) -> None:
        host, self.host = self.host, None
        if host is None:
            return
        try:
            if not host.is_over:
                await host.request("close", env=self.number)
        finally:
            self.pool.released(host)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, list, dict, type(None)))


@component
class HostedDescription(EnvironmentDescription):
    """Base of environments in processes of their own.

    Args:
        processes: beside each process of the actor.
        python: the interpreter that runs them, with its own packages; None: this one.
        recovery: of environments that do not say it of themselves, as an attribute of the class or of the file of
            tools; see `verl.environments.base.Environment`.
    """

    has_rewards: ClassVar[bool] = True

    processes: PositiveInt = 1
    python: str | None = None
    recovery: Recovery = "restart"

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
        """What a process tells of itself when it starts, so that code of the user or a package is not run in this one.

        Args:
            what: the setting that is to blame where it cannot start.
        Raises:
            ConfigError: it does not start.
        """

        async def started() -> Any:
            host = Host(self.host_options() | options, self.python or sys.executable)
            try:
                return await asyncio.wait_for(host.start(), self.reset_timeout_s)
            finally:
                await host.close()

        from verl.http_client.client import EventLoopThread

        thread = EventLoopThread("an environment's description")
        try:
            return thread.wait(thread.begin(started()), self.reset_timeout_s + 10)
        except TimeoutError as error:
            raise ConfigError(
                f"environment.{what}: its process did not start within environment.reset_timeout_s "
                f"{self.reset_timeout_s:g}. Raise that."
            ) from error
        except InfraError as error:
            raise ConfigError(f"environment.{what}: {error}") from error
        finally:
            thread.close()


@component
class FunctionEnvironment(HostedDescription):
    """A user's class with `reset(row, seed)` and `step(action)`, coroutines or not; see docs/environments.md.

    Args:
        path: `file.py:Class` or `module:Class`.
        arguments: of its constructor.
    """

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

    def host_options(self) -> dict[str, Any]:
        return {"kind": "class", "path": self.path, "arguments": dict(self.arguments)}


@component
class _PackageEnvironment(HostedDescription):
    """Base of environments of a package."""

    package: ClassVar[str] = ""

    arguments: Mapping[str, Any] = Field(default_factory=dict)

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        if self.python is None and importlib.util.find_spec(self.package) is None:
            yield (
                f"_target_ is {type(self).__name__}: needs the package {self.package}, which is not installed. Install "
                "it, or give environment.python an interpreter that has it."
            )

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

    package: ClassVar[str] = "reasoning_gym"

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

    package: ClassVar[str] = "verifiers"
    FIRST: ClassVar[int] = 1024  # prompts that are asked for with the tools

    taskset: str
    paths: tuple[str, ...] = ()

    def host_options(self) -> dict[str, Any]:
        agent = {"max_turns": self.max_turns, **self.arguments.get("agent", {})}
        taskset = {"id": self.taskset, **self.arguments.get("taskset", {})}
        config = {**self.arguments, "taskset": taskset, "agent": agent}
        paths = [str(Path(path).resolve()) for path in self.paths]
        path = f"{ADAPTERS / self.package}_adapter.py:VerifiersTask"
        return {"kind": "class", "path": path, "arguments": {"config": config, "paths": paths}}

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
        for schema in self.described:
            self.tools[schema["name"]] = Tool(**schema, function=self._caller(schema["name"]))
        self.tool_parameters = {name: tool.parameters for name, tool in self.tools.items()}

    def _caller(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            host = await self.host()
            try:
                return await host.request("call", name=name, arguments=arguments)
            except asyncio.CancelledError:  # its deadline has come
                host.hung += 1
                raise
            finally:
                self.end_if_idle(host)

        return call

    def make(self) -> ToolEnvironment:
        assert isinstance(self.options, PythonTools)
        made = ToolEnvironment(self.tools, self.options.step_timeout_s, self.options.suffix)
        made.recovery = self.recovery
        return made


@component
class PythonTools(HostedDescription):
    """Public functions of a user's file as tools: name, arguments by their annotations, docstring.

    Exceptions of a function are shown to the model, except ConnectionError, TimeoutError and MemoryError, which count
    as failures of the infrastructure.

    Args:
        path: `file.py` or `module`.
        suffix: appended to a tool result if the prompt is not a chat.
    """

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
