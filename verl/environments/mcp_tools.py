"""`environment=mcp`: the tools of an MCP server, over stdio or streamable HTTP, by the package `mcp`.

All episodes of a process share one session. Where it is lost (the server was started again, its program has ended), the
call that finds out fails as `infra`, and the episode that begins anew meets a new session. A call that the server
refuses because it does not know the session is made again in a new one, since it was not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar

from verl.component import BuildContext, component, package_fault
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, InfraError, Recovery, ToolError
from verl.environments.tools import Tool, ToolFactory
from verl.errors import ConfigError

log = logging.getLogger(__name__)


INVALID_PARAMS = -32602  # JSON-RPC: the arguments are the caller's fault
SESSION_ENDED = ("Session terminated", "Session not found")  # of status 404: the server does not know the session
CLOSE_S = 5.0


class _McpConnection:
    """One session with the server. It lives in a task of its own, as the package wants it.

    Attributes:
        tools: as the server lists them.
    """

    def __init__(self, options: MCPTools):
        self.options = options
        self.session: Any = None
        self.tools: list[Any] = []
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._num_calls, self._is_retired = 0, False

    @property
    def is_open(self) -> bool:
        return self.session is not None and not self._is_retired

    @property
    def has_ended(self) -> bool:
        return self._task is None or self._task.done()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        self._num_calls += 1
        try:
            return await self.session.call_tool(name, arguments)
        finally:
            self._num_calls -= 1
            self._end_if_idle()

    async def open(self, timeout_s: float) -> None:
        """Raises InfraError: there is no server, or it did not answer in time."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))
        try:
            await asyncio.wait_for(ready, timeout_s)
        except TimeoutError as error:
            self._task.cancel()  # it waits for the server, not for its end
            await self.close()
            raise InfraError(f"{self.options.server} did not answer within {timeout_s:g} s") from error

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        why: BaseException | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                session = await stack.enter_async_context(_opened(self.options, stack))
                self.tools = list((await session.list_tools()).tools)
                self.session = session
                if not ready.done():
                    ready.set_result(None)
                await self._end.wait()
        except BaseException as error:  # noqa: BLE001 - of the server, or of the package
            why = error
        finally:
            self.session = None
            if not ready.done():
                ready.set_exception(InfraError(f"{self.options.server}: {_reason(why)}"))

    def retire(self) -> None:
        """No new call uses it; it ends with the last call that does."""
        self._is_retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._num_calls:
            self._end.set()

    async def close(self) -> None:
        self._end.set()
        if self._task is not None:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(self._task, CLOSE_S)


class _Server(ToolFactory):
    """Calls over one session at a time; if it is lost, the next call opens another one."""

    def __init__(self, options: MCPTools):
        super().__init__(options, [], options.recovery)
        self.connection: _McpConnection | None = None
        self._old: list[_McpConnection] = []
        self._opening = asyncio.Lock()

    async def start(self) -> None:
        tools = []
        for tool in (await self._connected(self.options.reset_timeout_s)).tools:
            schema = getattr(tool, "inputSchema", None) or getattr(tool, "input_schema", {})
            tools.append(Tool(tool.name, tool.description or "", schema, self._caller(tool.name)))
        self.use(tools)

    async def _connected(self, timeout_s: float) -> _McpConnection:
        async with self._opening:
            if self.connection is not None and self.connection.is_open:
                return self.connection
            if self.connection is not None:
                self._old.append(self.connection)
            connection = _McpConnection(self.options)
            await connection.open(timeout_s)
            if self.connection is not None:
                log.warning("%s: the session was lost, and another one was opened.", self.options.server)
            self._old = [old for old in self._old if not old.has_ended]
            self.connection = connection
            return connection

    def _caller(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            result = await self._called(name, arguments)
            text = "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")
            if getattr(result, "isError", False) or getattr(result, "is_error", False):
                raise ToolError(text)
            return text

        return call

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> Any:
        # A part of the call's time, so that a server that is gone is not a time-out, which would be the model's.
        connecting_s = min(self.options.reset_timeout_s, 0.8 * self.options.step_timeout_s)
        for is_last in (False, True):
            connection = await self._connected(connecting_s)
            try:
                return await connection.call(name, dict(arguments))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if getattr(error, "code", None) == INVALID_PARAMS:
                    raise ToolError(_reason(error)) from error
                connection.retire()
                # A call that may have been carried out is not repeated.
                if is_last or not any(phrase in str(error) for phrase in SESSION_ENDED):
                    raise InfraError(f"{self.options.server}: {_reason(error)}") from error
        raise AssertionError

    async def stop(self) -> None:
        for connection in [*self._old, self.connection]:
            if connection is not None:
                await connection.close()
        self._old, self.connection = [], None


@contextlib.asynccontextmanager
async def _opened(options: MCPTools, stack: contextlib.AsyncExitStack) -> AsyncIterator[Any]:
    import mcp

    if options.command is not None:
        from mcp.client.stdio import stdio_client

        program, *arguments = options.command
        parameters = mcp.StdioServerParameters(command=program, args=arguments)
        streams = await stack.enter_async_context(stdio_client(parameters))
    else:
        from mcp.client.streamable_http import (
            create_mcp_http_client,  # pyright: ignore[reportPrivateImportUsage] - its own module is private
            streamable_http_client,
        )

        headers = {name: os.environ[variable] for name, variable in options.headers_from_env.items()}
        client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
        assert options.url is not None
        streams = await stack.enter_async_context(streamable_http_client(options.url, http_client=client))
    session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
    await session.initialize()
    yield session


def _reason(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@component
class MCPTools(EnvironmentDescription):
    """Tools of an MCP server; a turn without a call is the answer, which `reward` rates.

    Args:
        command: program and arguments of a server over stdio.
        url: of a server over streamable HTTP; one of the two.
        headers_from_env: headers of requests to `url`, each with the name of the environment variable that holds it.
        recovery: what its tools are, see `verl.environments.base.Environment`.
        suffix: appended to a tool result if the prompt is not a chat.
    """

    has_tools: ClassVar[bool] = True

    command: tuple[str, ...] | None = None
    url: str | None = None
    headers_from_env: Mapping[str, str] = field(default_factory=dict)
    suffix: str = "\n"
    recovery: Recovery = "restart"

    @property
    def server(self) -> str:
        """The server in messages."""
        return f"the MCP server {self.url or ' '.join(self.command or ())}"

    def faults(self) -> Iterator[str]:
        if (self.command is None) == (self.url is None):
            yield "command is null and url is null, or both are given: give one of them."

    def machine_faults(self) -> Iterator[str]:
        if (fault := package_fault("mcp", "another environment")) is not None:
            yield f"_target_ is {type(self).__name__}: {fault}"
        for name, variable in self.headers_from_env.items():
            if variable not in os.environ:
                yield f"headers_from_env has {name}: {variable}, and there is no such environment variable."

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        from verl.http_client.client import EventLoopThread

        async def ask() -> Any:
            server = _Server(self)
            try:
                await server.start()
                return [tool.schema for tool in server.tools.values()]
            finally:
                await server.stop()

        thread = EventLoopThread("tool schemas")
        try:
            return tuple(thread.wait(thread.begin(ask()), self.reset_timeout_s + 2 * CLOSE_S))
        except (InfraError, TimeoutError) as error:
            which = "command" if self.url is None else "url"
            raise ConfigError(f"environment.{which}: {error}") from error
        finally:
            thread.close()

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _Server(self)
