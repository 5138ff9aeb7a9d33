"""A pool of processes that run environments, the environments in them, and the settings that all of these share.

The episodes of a process that ended are restarted in another one. A process with a hanging call gets no new
environments and is killed after its last one. `CallRecord.fault` says whose failure it was, and `HostPool.own_host`
gives an episode a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.environments.base import (
    Action,
    Environment,
    EnvironmentDescription,
    EnvironmentFactory,
    InfraError,
    Recovery,
    StepResult,
)
from verl.environments.hosts.host_process import Host
from verl.errors import ConfigError

MAX_ALONE = 8  # episodes that have a process of their own, for each process of the actor


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
            number = self._next % len(self._hosts)
            self._next += 1
            host = self._hosts[number]
            if host is None or host.is_over or host.hung:
                if host is not None:
                    self._others.add(host)
                    self._end_if_idle(host)
                host = self._hosts[number] = await self._started()
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
        turn = {"text": action.text, "calls": calls, "call_id": action.call_id}
        result = await self._request("step", self.pool.options.step_timeout_s, action=turn)
        if not isinstance(result, dict):
            raise InfraError(f"a reply of the environment is {str(result)[:80]}: expected an object")
        return StepResult(**result)

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
