"""`environment=mcp`: the tools of an MCP server, over stdio or streamable HTTP, by the package `mcp`.

All episodes of a process share one session. If the session is lost (the server restarted or exited), the call that
notices it fails as `infra`, and the next call opens a new session. A call rejected because the server does not know the
session was not executed, so it is repeated in a new session.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar

from verl.component import BuildContext, component, package_fault
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, InfraError, Recovery, ToolError
from verl.environments.tools import Tool, ToolFactory
from verl.errors import ConfigError

log = logging.getLogger(__name__)


INVALID_PARAMS = -32602  # JSON-RPC: the arguments are the caller's fault
SESSION_ENDED = ("Session terminated", "Session not found")  # status 404: the server does not know the session
CLOSE_S = 5.0


class _McpConnection:
    """One session with the server, in a separate task: the contexts of the package must be left by the task that
    entered them.

    Attributes:
        tools: as the server lists them.
        is_open: new calls may use it.
    """

    def __init__(self, options: MCPTools):
        self.options = options
        self.tools: list[Any] = []
        self.is_open = False
        self._session: Any = None
        self._num_calls = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._serve())

    async def await_open(self, timeout_s: float) -> None:
        """Raises InfraError: there is no server, or it did not answer in time."""
        try:
            await asyncio.wait_for(self._ready, timeout_s)
        except TimeoutError as error:
            self.task.cancel()
            await self.close()
            raise InfraError(f"{self.options.server} did not answer within {timeout_s:g} s") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        self._num_calls += 1
        try:
            return await self._session.call_tool(name, arguments)
        finally:
            self._num_calls -= 1
            if not self.is_open:
                self.retire()

    def retire(self) -> None:
        """Refuse new calls, and end when the calls in progress have returned."""
        self.is_open = False
        if not self._num_calls:
            self._end.set()

    async def close(self) -> None:
        self._end.set()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await asyncio.wait_for(self.task, CLOSE_S)

    async def _serve(self) -> None:
        from mcp.types import PaginatedRequestParams

        try:
            async with contextlib.AsyncExitStack() as stack:
                self._session = await _opened(self.options, stack)
                page = await self._session.list_tools()
                self.tools = list(page.tools)
                while cursor := page.next_cursor:
                    page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                    self.tools += page.tools
                self.is_open = True
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._end.wait()
        except BaseException as error:  # noqa: BLE001 - of the server, or of the package
            if not self._ready.done():
                self._ready.set_exception(InfraError(f"{self.options.server}: {_reason(error)}"))
        finally:
            self.is_open = False


class _Server(ToolFactory):
    """Calls over one session at a time; if it is lost, the next call opens another one."""

    def __init__(self, options: MCPTools):
        super().__init__(options, [], options.recovery)
        self._connections: list[_McpConnection] = []  # the last one is used
        self._opening = asyncio.Lock()

    async def start(self) -> None:
        tools = []
        for tool in (await self.connected(self.options.reset_timeout_s)).tools:
            schema = getattr(tool, "inputSchema", None) or getattr(tool, "input_schema", {})
            tools.append(Tool(tool.name, tool.description or "", schema, functools.partial(self._call, tool.name)))
        self.use(tools)

    async def connected(self, timeout_s: float) -> _McpConnection:
        """The open connection, or a new one."""
        async with self._opening:
            if self._connections and self._connections[-1].is_open:
                return self._connections[-1]
            connection = _McpConnection(self.options)
            await connection.await_open(timeout_s)
            if self._connections:
                log.warning("%s: the session was lost, and another one was opened.", self.options.server)
            self._connections = [*(old for old in self._connections if not old.task.done()), connection]
            return connection

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        result = await self._result(name, arguments, is_first=True)
        parts = [_part(part) for part in result.content]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if getattr(result, "isError", False) or getattr(result, "is_error", False):
            raise ToolError(text)
        return text if all(part["type"] == "text" for part in parts) else parts

    async def _result(self, name: str, arguments: dict[str, Any], is_first: bool) -> Any:
        # Less than the time of the call: a server that is gone must not count as a time-out, which is scored.
        connection = await self.connected(min(self.options.reset_timeout_s, 0.8 * self.options.step_timeout_s))
        try:
            return await connection.call(name, arguments)
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:
                raise ToolError(_reason(error)) from error
            connection.retire()
            # A call that may have been executed is not repeated.
            if not is_first or not any(phrase in str(error) for phrase in SESSION_ENDED):
                raise InfraError(f"{self.options.server}: {_reason(error)}") from error
        return await self._result(name, arguments, is_first=False)

    async def stop(self) -> None:
        while self._connections:
            await self._connections.pop().close()


async def _opened(options: MCPTools, stack: contextlib.AsyncExitStack) -> Any:
    """A session of the package `mcp`, which ends with the stack."""
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
    return session


def _part(part: Any) -> dict[str, str]:
    """A part of a result as an image or a text; of a resource its text, or its address."""
    if part.type == "image":
        return {"type": "image", "image": f"data:image/*;base64,{part.data}"}
    found = [getattr(getattr(part, "resource", part), name, None) for name in ("text", "uri")]
    return {"type": "text", "text": str(next((x for x in found if x is not None), f"({part.type})"))}


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@component
class MCPTools(EnvironmentDescription):
    """Tools of an MCP server; a turn without a call is the answer, which `reward` scores.

    Args:
        command: program and arguments of a server over stdio.
        url: of a server over streamable HTTP; one of the two.
        headers_from_env: headers of requests to `url`, each with the name of the environment variable that holds it.
        recovery: of its tools, see `verl.environments.base.Environment`.
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
