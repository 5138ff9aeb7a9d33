"""Environments in separate processes: a user's class or functions, gymnasium, textarena, reasoning_gym, verifiers; see
`hosts/`."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentFactory
from verl.environments.hosts.host_pool import HostedDescription, HostPool
from verl.environments.hosts.host_process import PROGRAMS, Host
from verl.environments.tools import Tool, ToolEnvironment


@component
class FunctionEnvironment(HostedDescription):
    """A user's class with `reset(row, seed)` and `step(action)`, coroutines or not; see docs/environments.md.

    Args:
        path: `file.py:Class` or `module:Class`.
        arguments: arguments of its constructor.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "environments.py:MyEnvironment"}

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

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
    """Base of environments from a package.

    Attributes:
        names: the field that names one of the package's environments, and argument of the adapter.
        adapter: class in `hosts/PACKAGE_adapter.py`.
    """

    package: ClassVar[str] = ""
    names: ClassVar[str] = "env_id"
    adapter: ClassVar[str] = ""

    arguments: Mapping[str, Any] = field(default_factory=dict)

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        if self.python is None and importlib.util.find_spec(self.package) is None:
            yield (
                f"_target_ is {type(self).__name__}: needs the package {self.package}, which is not installed. Install "
                "it, or give environment.python an interpreter that has it."
            )

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from self.start_faults(f"{self.names} is {getattr(self, self.names)!r}", **{"try": "reset"})

    def host_options(self) -> dict[str, Any]:
        path = f"{PROGRAMS / self.package}_adapter.py:{self.adapter}"
        return {"kind": "class", "path": path, "arguments": {self.names: getattr(self, self.names), **self.arguments}}


@component
class GymnasiumEnvironment(_PackageEnvironment):
    """An environment of gymnasium whose observations can be read as text.

    Args:
        env_id: such as `FrozenLake-v1`.
        arguments: of `gymnasium.make`.
    """

    example_values: ClassVar[Mapping[str, str]] = {"env_id": "FrozenLake-v1"}
    package: ClassVar[str] = "gymnasium"
    adapter: ClassVar[str] = "Text"

    env_id: str


@component
class TextArenaEnvironment(_PackageEnvironment):
    """A game of textarena for one player.

    Args:
        env_id: such as `GuessTheNumber-v0`.
        arguments: of `textarena.make`.
    """

    example_values: ClassVar[Mapping[str, str]] = {"env_id": "GuessTheNumber-v0"}
    package: ClassVar[str] = "textarena"
    adapter: ClassVar[str] = "Game"

    env_id: str


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
    adapter: ClassVar[str] = "ReasoningTask"

    task: str


class _VerifiersPool(HostPool):
    async def start(self) -> None:
        await super().start()
        self.tool_parameters = {tool["name"]: tool.get("parameters") or {} for tool in self.described["tools"]}


@component
class VerifiersEnvironment(_PackageEnvironment):
    """Tasks of the package verifiers (0.4), each an environment of one agent with its own tools and rewards.

    Args:
        taskset: the id of a taskset of verifiers, which is the name of a module.
        paths: further directories in which to search for that module.
        arguments: further configuration of verifiers' environment, such as {agent: {harness: {id: null}}}. By default,
            the harness is a chat in the environment's process, and the runtime a directory of this machine.
    """

    example_values: ClassVar[Mapping[str, str]] = {"taskset": "my_taskset, the name of an installed module"}
    package: ClassVar[str] = "verifiers"
    names: ClassVar[str] = "taskset"
    adapter: ClassVar[str] = "VerifiersTask"
    FIRST: ClassVar[int] = 1024  # prompts requested together with the tools

    taskset: str
    paths: tuple[str, ...] = ()

    def host_options(self) -> dict[str, Any]:
        agent = {"max_turns": self.max_turns, **self.arguments.get("agent", {})}
        taskset = {"id": self.taskset, **self.arguments.get("taskset", {})}
        config = {**self.arguments, "taskset": taskset, "agent": agent}
        paths = [str(Path(path).resolve()) for path in self.paths]
        return {**super().host_options(), "arguments": {"config": config, "paths": paths}, "describe": 0}

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from ()  # `tool_schemas` asks for a task

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple({"type": "function", "function": tool} for tool in self._described(0)["tools"])

    def prompts(self, count: int) -> Sequence[Sequence[Mapping[str, Any]]]:
        return self._described(count)["prompts"][:count]

    def _described(self, count: int) -> Any:
        """Cached, because a process takes seconds to import the package."""
        count = max(count, self.FIRST)
        key = json.dumps(self.host_options(), sort_keys=True), self.python, count
        if key not in _described:
            _described[key] = self.ask(f"taskset is {self.taskset!r}", describe=count)
        return _described[key]

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _VerifiersPool(self)


_described: dict[tuple[str, str | None, int], Any] = {}


class _ToolPool(HostPool):
    options: PythonTools

    async def start(self) -> None:
        await super().start()
        self.tool_parameters = {tool["name"]: tool["parameters"] for tool in self.described}

    def make(self) -> ToolEnvironment:
        return _HostedTools(self, is_alone=False)

    def make_alone(self) -> ToolEnvironment:
        return _HostedTools(self, is_alone=True)


class _HostedTools(ToolEnvironment):
    """An episode whose tools run in any process of the pool, or in its own process."""

    host: Host

    def __init__(self, pool: _ToolPool, is_alone: bool):
        tools = {
            tool["name"]: Tool(**tool, function=functools.partial(self._request, tool["name"]), keeps_deadline=True)
            for tool in pool.described
        }
        super().__init__(tools, pool.options.step_timeout_s, pool.options.suffix, pool.recovery)
        self.pool, self.is_alone = pool, is_alone

    async def acquire_process(self) -> None:
        if self.is_alone:
            self.host = await self.pool.own_host()

    async def _request(self, name: str, /, **arguments: Any) -> Any:
        host = self.host if self.is_alone else await self.pool.host()
        try:
            return await host.request("call", limit_s=self.timeout_s, name=name, arguments=arguments)
        finally:
            if not self.is_alone:
                await self.pool.release(host)

    async def close(self) -> None:
        if (host := vars(self).pop("host", None)) is not None:
            await self.pool.release(host)


@component
class PythonTools(HostedDescription):
    """Public functions of a user's file as tools, with names, annotated arguments and docstrings.

    Exceptions of a function are shown to the model, except ConnectionError, TimeoutError and MemoryError, which count
    as failures of the infrastructure.

    Args:
        path: `file.py` or `module`.
        suffix: appended to a tool result if the prompt is not a chat.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "tools.py"}
    has_tools: ClassVar[bool] = True

    path: str
    suffix: str = "\n"

    def faults(self) -> Iterator[str]:
        if ":" in Path(self.path).name:
            yield f"path is {self.path!r}: expected file.py or module. All its public functions are tools: name none."

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        if self.path.endswith(".py") and not Path(self.path).is_file():
            yield f"path is {self.path!r}: there is no such file."

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        schemas = self.ask(f"path is {self.path!r}")
        return tuple({"type": "function", "function": schema} for schema in schemas)

    def host_options(self) -> dict[str, Any]:
        return {"kind": "tools", "path": self.path}

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _ToolPool(self)
