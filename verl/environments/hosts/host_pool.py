"""A pool of processes that run environments, the environments in them, and their shared settings.

The episodes of a process that ended are restarted in another one. A process with a hanging call gets no new
environments and is killed after its last one. `CallRecord.fault` records whose failure it was, and `HostPool.own_host`
gives an episode its own process.
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
from verl.utils.child_process.pool import ProcessPool

MAX_ALONE = 8  # maximum episodes with their own process, per process of the actor
PLAIN = (str, int, float, bool, list, dict, type(None))  # values of columns that are sent to environments


class HostPool(EnvironmentFactory):
    """The host processes of one process of the actor.

    Attributes:
        recovery: recovery of its environments: what they declare, else `environment.recovery`.
        described: what a process reported at its start.
    """

    described: Any = None

    def __init__(self, options: HostedDescription):
        self.options = options
        self.recovery: Recovery = options.recovery
        self._alone, self._num_alone = set[Host](), asyncio.Semaphore(MAX_ALONE)
        self._digest: str | None = None  # of the file of the environment at the start

    def _new_host(self, is_alone: bool = False) -> Host:
        return self.options.host(is_alone, self._digest)

    async def start(self) -> None:
        self._taking = asyncio.Lock()  # so that one thread at a time waits for a process
        self._hosts = ProcessPool(self._new_host, self.options.num_processes, max_loans=None)
        host = await self.host()
        self._digest = host.digest
        self.described, self.recovery = host.described, self.options.recovery_of(host.recovery)
        await self.release(host)

    async def host(self) -> Host:
        """The host with the fewest environments among those that accept new ones; must be followed by `release`."""
        async with self._taking:
            host = await asyncio.to_thread(self._hosts.take)
        host.environments += 1
        return host

    async def own_host(self) -> Host:
        """A host for one episode; waits while MAX_ALONE episodes have one. Must be followed by `release`."""
        await self._num_alone.acquire()
        host = None
        try:
            host = self._new_host(is_alone=True)
            self._alone.add(host)
            await asyncio.to_thread(host.await_ready)
        except BaseException:
            self._num_alone.release()
            if host is not None:
                self._alone.discard(host)
                await asyncio.to_thread(host.kill)
            raise
        host.environments += 1
        return host

    async def release(self, host: Host) -> None:
        """Called when an environment of a host has ended."""
        host.environments -= 1
        if host in self._alone:
            self._alone.discard(host)
            self._num_alone.release()
            await asyncio.to_thread(host.kill)
        else:
            await asyncio.to_thread(self._hosts.give_back, host)

    def make(self) -> Any:
        return HostedEnvironment(self)

    def make_alone(self) -> Any:
        return HostedEnvironment(self, is_alone=True)

    async def stop(self) -> None:
        if hasattr(self, "_hosts"):
            await asyncio.to_thread(self._hosts.close)
        while self._alone:
            await asyncio.to_thread(self._alone.pop().kill)


class HostedEnvironment(Environment):
    """An environment that runs in a host."""

    numbers = itertools.count()
    keeps_deadlines = True

    def __init__(self, pool: HostPool, is_alone: bool = False):
        self.pool, self.is_alone, self.number = pool, is_alone, next(self.numbers)
        self.host: Host | None = None
        self.is_closed = False
        self.recovery = pool.recovery

    async def acquire_process(self) -> None:
        """Choose the process, and start it if necessary, before `reset`."""
        host = await (self.pool.own_host() if self.is_alone else self.pool.host())
        if self.is_closed:  # while it waited
            await self.pool.release(host)
            raise InfraError("the environment was closed before its first call")
        self.host = host

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        plain = {name: value for name, value in row.items() if isinstance(value, PLAIN)}
        return await self._request("reset", self.pool.options.reset_timeout_s, self.host, row=plain, seed=seed)

    async def step(self, action: Action) -> StepResult:
        calls = [dict(vars(call)) for call in action.calls]
        turn = {"text": action.text, "calls": calls, "call_id": action.call_id}
        result = await self._request("step", self.pool.options.step_timeout_s, self.host, action=turn)
        if not isinstance(result, dict):
            raise InfraError(f"a reply of the environment is {str(result)[:80]}: expected an object")
        return StepResult(**result)

    async def close(self) -> None:
        host, self.host, self.is_closed = self.host, None, True
        if host is None:
            return
        try:
            if not host.is_over and not (host.is_alone and host.hung):
                await self._request("close", self.pool.options.step_timeout_s, host)
        finally:
            await self.pool.release(host)

    async def _request(self, op: str, limit_s: float, host: Host | None, **fields: Any) -> Any:
        assert host is not None
        return await host.request(op, f"env {self.number}", limit_s=limit_s, env=self.number, **fields)


@component
class HostedDescription(EnvironmentDescription):
    """Base of environments in separate processes.

    Args:
        processes: number per process of the actor; None for two, or one on a single core.
        python: the interpreter that runs them, with its own packages; None for this one.
        recovery: recovery of environments that do not declare it as an attribute of their class or file of tools; see
            `verl.environments.base.Environment`.
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

    def recovery_of(self, own: Any) -> Recovery:
        """The recovery of environments that declare this value; None if they declare none.

        Raises:
            ConfigError: the value is invalid, or the configuration has another one.
        """
        kinds = get_args(Recovery)
        if own is not None and own not in kinds:
            raise ConfigError(
                f"environment: recovery of its class is {own!r}: expected {', '.join(kinds)}. Correct it there."
            )
        if own in (None, "restart"):  # the default, which a subclass of `Environment` inherits
            return self.recovery
        if self.recovery not in ("restart", own):
            raise ConfigError(
                f"environment.recovery is {self.recovery}, and the attribute of the environment is {own}. Leave "
                "environment.recovery out, or correct the attribute."
            )
        return own

    def host_options(self) -> dict[str, Any]:
        """The first message to a host."""
        raise NotImplementedError

    def host(self, is_alone: bool = False, digest: str | None = None, **options: Any) -> Host:
        """Start a process of the environment, whose file must have the digest; the caller has to `kill` it."""
        message, python = {**self.host_options(), **options}, self.python or sys.executable
        return Host(message, python, self.reset_timeout_s, is_alone, digest)

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return HostPool(self)

    def ask(self, what: str, **options: Any) -> Any:
        """First message of a started process, so that this one does not run code of the user or of a package.

        Args:
            what: the setting that the error names if it does not start.
        Raises:
            ConfigError: the process does not start.
        """
        try:
            host = self.host(**options)
            try:
                host.await_ready()
                return host.described
            finally:
                host.kill()
        except InfraError as error:
            raise ConfigError(f"environment.{what}: {error}") from error

    def start_faults(self, what: str, **options: Any) -> Iterator[str]:
        """Reasons why a process of the environment cannot start, for `preflight`."""
        try:
            self.ask(what, **options)
        except ConfigError as error:
            yield from (fault.removeprefix("environment.") for fault in error.faults)
