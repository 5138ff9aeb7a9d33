"""Tools of an MCP server: real servers of the package `mcp`, over stdio and over streamable HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import sys
import threading
import time

import pytest

from verl.environments.base import Action
from verl.environments.mcp_tools import MCPTools
from verl.environments.tool_calls import ToolCall
from verl.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed")

TOOLS = '''
import time
from mcp.server import MCPServer

def make():
    server = MCPServer("numbers")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def fail() -> str:
        """Always fails."""
        raise ValueError("it failed")

    @server.tool()
    async def wait(seconds: float) -> str:
        """Waits."""
        import asyncio
        await asyncio.sleep(seconds)
        return "waited"

    return server

if __name__ == "__main__":
    make().run()
'''


class HTTPServer:
    """The server in a thread, on a port that it keeps when it is started again."""

    def __init__(self):
        self.port = 0
        self.headers: list[str | None] = []

    def start(self):
        import uvicorn

        names: dict = {"__name__": "tools"}
        exec(TOOLS, names)
        app = names["make"]().streamable_http_app()

        async def watched(scope, receive, send):
            self.headers.append(dict(scope.get("headers") or []).get(b"authorization", b"").decode() or None)
            await app(scope, receive, send)

        listener = socket.create_server(("127.0.0.1", self.port))  # of its own from the beginning
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.server = uvicorn.Server(uvicorn.Config(watched, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture
def http():
    server = HTTPServer()
    server.start()
    yield server
    server.stop()


@contextlib.asynccontextmanager
async def started(options):
    factory = options.factory(None)
    await factory.start()
    try:
        yield factory
    finally:
        await factory.stop()


async def step(factory, *calls):
    environment = factory.make()
    await environment.reset({}, 0)
    return await environment.step(Action("", calls))


CALLS = (ToolCall("add", {"a": 2, "b": 3}), ToolCall("fail", {}), ToolCall("add", {"a": 1}))


def assert_typed(found):
    assert [record.outcome for record in found.calls] == ["ok", "tool_error", "tool_error"]
    assert found.observation.splitlines()[0] == "5"
    assert "error: Error executing tool fail" in found.observation


@pytest.mark.slow
def test_tools_are_called_over_stdio_and_a_server_that_died_is_started_again(tmp_path):
    (tmp_path / "server.py").write_text(TOOLS)
    options = MCPTools(command=(sys.executable, str(tmp_path / "server.py")), step_timeout_s=60.0)

    async def play():
        async with started(options) as factory:
            assert factory.tools["add"].schema["function"]["description"] == "Add two numbers."
            assert_typed(await step(factory, *CALLS))
            (await factory.connected(1.0)).retire()  # as a call does that found its session lost
            assert_typed(await step(factory, *CALLS))

    asyncio.run(play())
    with pytest.raises(ConfigError, match=r"environment\.command: the MCP server .*exit"):
        MCPTools(command=(sys.executable, "-c", "exit(3)")).tool_schemas()


def test_tools_are_called_over_http_with_typed_outcomes_and_headers(http, monkeypatch):
    monkeypatch.setenv("MCP_TEST_TOKEN", "Bearer secret")
    headers = {"Authorization": "MCP_TEST_TOKEN"}
    options = MCPTools(url=http.url, step_timeout_s=2.0, headers_from_env=headers)
    assert {schema["function"]["name"] for schema in options.tool_schemas()} == {"add", "fail", "wait"}

    async def play():
        async with started(options) as factory:
            assert_typed(await step(factory, *CALLS))
            found = await step(factory, ToolCall("wait", {"seconds": 60.0}), ToolCall("add", {"a": 1, "b": 1}))
            assert [record.outcome for record in found.calls] == ["timeout", "ok"]
            assert "error: wait gave no answer within 2 s" in found.observation
            assert_typed(await step(factory, *CALLS))  # the session lives on

    asyncio.run(play())
    assert set(http.headers) <= {"Bearer secret", None}  # None: of the server's own life cycle
    assert "Bearer secret" in http.headers
    fault = next(iter(MCPTools(url=http.url, headers_from_env={"X": "NO_SUCH_VARIABLE"}).machine_faults()))
    assert "NO_SUCH_VARIABLE" in fault


def test_a_listener_that_never_answers_is_refused_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"environment\.url: the MCP server .* did not answer within 1 s"):
            MCPTools(url=url, reset_timeout_s=1.0).tool_schemas()
        assert time.monotonic() - began < 60


PAGES = """
import asyncio
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

async def listed(context, params):
    page = int(params.cursor) if params and params.cursor else 0
    tool = types.Tool(name=f"read{page}", input_schema={"type": "object", "properties": {}})
    return types.ListToolsResult(tools=[tool], next_cursor=None if page else "1")

async def called(context, params):
    file = types.TextResourceContents(uri="file:///a.txt", text="of a file")
    return types.CallToolResult(content=[
        types.EmbeddedResource(type="resource", resource=file),
        types.ResourceLink(type="resource_link", name="b", uri="file:///b.txt"),
    ])

async def main():
    server = Server("pages", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

asyncio.run(main())
"""


@pytest.mark.slow
def test_tools_of_all_pages_are_found_and_resources_in_a_result_are_read(tmp_path):
    (tmp_path / "server.py").write_text(PAGES)
    options = MCPTools(command=(sys.executable, str(tmp_path / "server.py")), step_timeout_s=60.0)

    async def play():
        async with started(options) as factory:
            assert list(factory.tools) == ["read0", "read1"]
            found = await step(factory, ToolCall("read1", {}))
            assert found.observation == "of a file\nfile:///b.txt\n"

    asyncio.run(play())
