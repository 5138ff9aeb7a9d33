"""`environment=mcp`: the tools of an MCP server, over stdio or HTTP, by the package `mcp`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from verl.component import BuildContext, component, package_fault
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, InfraError, ToolError
from verl.environments.tools import Tool, ToolEnvironment
from verl.errors import ConfigError


class _Server(EnvironmentFactory):
    """A session with the server, owned by one asyncio task as the package requires."""

    def __init__(self, options: MCPTools):
        self.options = options
        self.tools: dict[str, Tool] = {}
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._end = asyncio.Event()

    async def start(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())
        await self._ready

    async def _serve(self) -> None:
        assert self._ready is not None
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._session = await stack.enter_async_context(_opened(self.options, stack))
                listed = await self._session.list_tools()
                for tool in listed.tools:
                    schema = getattr(tool, "inputSchema", None) or getattr(tool, "input_schema", {})
                    self.tools[tool.name] = Tool(tool.name, tool.description or "", schema, self._caller(tool.name))
                self.tool_names = {name: tool.parameter_names for name, tool in self.tools.items()}
                self._ready.set_result(None)
                await self._end.wait()
        except BaseException as error:  # noqa: BLE001 - of the server, or of the package
            if not self._ready.done():
                self._ready.set_exception(InfraError(f"the MCP server: {_reason(error)}"))
        finally:
            self._session = None

    def _caller(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            if self._session is None:
                raise InfraError("the MCP server has ended")
            try:
                found = await self._session.call_tool(name, arguments)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                raise InfraError(f"the MCP server: {_reason(error)}") from error
            text = "\n".join(part.text for part in found.content if getattr(part, "type", "") == "text")
            if getattr(found, "isError", False) or getattr(found, "is_error", False):
                raise ToolError(text)
            return text

        return call

    def make(self) -> ToolEnvironment:
        return ToolEnvironment(self.tools, self.options.step_timeout_s, self.options.suffix)

    async def stop(self) -> None:
        self._end.set()
        if self._task is not None:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(self._task, 5.0)


@contextlib.asynccontextmanager
async def _opened(options: MCPTools, stack: contextlib.AsyncExitStack) -> Any:
    import mcp

    if options.command is not None:
        from mcp.client.stdio import stdio_client

        program, *arguments = options.command
        parameters = mcp.StdioServerParameters(command=program, args=arguments)
        streams = await stack.enter_async_context(stdio_client(parameters))
    else:
        import mcp.client.streamable_http as http

        connect = getattr(http, "streamable_http_client", None) or http.streamablehttp_client  # type: ignore
        streams = await stack.enter_async_context(connect(options.url))
    session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
    await session.initialize()
    yield session


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@component
class MCPTools(EnvironmentDescription):
    """Tools of an MCP server; a turn without a call is the answer, which `reward` rates.

    Args:
        command: program and arguments of a server over stdio.
        url: of a server over HTTP; one of the two.
        suffix: appended to a tool result if the prompt is not a chat.
    """

    command: tuple[str, ...] | None = None
    url: str | None = None
    suffix: str = "\n"

    def faults(self) -> Iterator[str]:
        if (self.command is None) == (self.url is None):
            yield "command is null and url is null, or both are given: give one of them."

    def faults_here(self) -> Iterator[str]:
        if (fault := package_fault("mcp", "another environment")) is not None:
            yield f"_target_ is {type(self).__name__}: {fault}"

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
            return tuple(thread.wait(thread.begin(ask()), self.reset_timeout_s))
        except (InfraError, TimeoutError) as error:
            raise ConfigError(f"environment.command is {self.command}, url {self.url}: {error}") from error
        finally:
            thread.close()

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _Server(self)
