"""Environments of real packages; `VERL_ENVIRONMENTS_PYTHON` names an interpreter with those that are not here."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import subprocess
import sys

import pytest
from environments.episodes import engine_of, prompts_of, tiny

from verl.environments.base import Action, InfraError
from verl.environments.hosted import GymnasiumEnvironment, ReasoningGymEnvironment, TextArenaEnvironment
from verl.environments.mcp_tools import MCPTools
from verl.environments.tool_calls import ToolCall
from verl.rollout.base import GenerationRequest

EACH = tuple(range(6, 100))


@functools.cache
def interpreter_with(package: str) -> str | None:
    """This interpreter, or the named one; skips by name where neither has the package."""
    if importlib.util.find_spec(package) is not None:
        return None
    other = os.environ.get("VERL_ENVIRONMENTS_PYTHON")
    if other and subprocess.run([other, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0:
        return other
    return pytest.skip(f"{package} is not installed, here or in VERL_ENVIRONMENTS_PYTHON")


def played(environment, steps=5, **options):
    """Five steps of episodes; their records."""
    model = tiny(context_length=4096)
    engine = engine_of(environment, model=model, stop_token_ids=EACH, max_new_tokens=4, **options)
    prompts = prompts_of(model[1], ["Play. ", "Go. "], index=[3, 8])
    try:
        return [engine.generate(prompts, GenerationRequest(step, 2)) for step in range(steps)]
    finally:
        engine.close()


def observations(rows):
    return [turn["observation"] for record in rows["episode"] for turn in record["turns"]]


def test_an_environment_of_gymnasium_is_played():
    python = interpreter_with("gymnasium")
    environment = GymnasiumEnvironment(
        env_id="FrozenLake-v1", arguments={"render_mode": "ansi"}, python=python, max_turns=6, max_tokens=2000
    )
    for rows in played(environment):
        assert {record["end"] for record in rows["episode"]} <= {"terminated", "truncated", "turns"}
        assert any(
            "expected an action of Discrete(4)" in (text or "") or "FFF" in (text or "") for text in observations(rows)
        )


def test_a_task_of_reasoning_gym_is_asked_and_scored():
    python = interpreter_with("reasoning_gym")
    environment = ReasoningGymEnvironment(task="leg_counting", python=python, max_tokens=2000)
    for rows in played(environment, max_rows=8):
        assert {record["end"] for record in rows["episode"]} == {"terminated"}
        assert all(0 <= record["reward"] <= 1 for record in rows["episode"])
        assert (~rows["response_mask"] & (rows["turn_ids"] == 0)).sum() > 100  # the question


def test_a_game_of_textarena_is_played():
    python = interpreter_with("textarena")
    environment = TextArenaEnvironment(
        env_id="GuessTheNumber-v0", python=python, max_turns=3, max_tokens=3000, max_observation_tokens=900
    )
    for rows in played(environment):
        assert {record["end"] for record in rows["episode"]} <= {"terminated", "truncated", "turns"}


SERVER = '''
import sys
sys.path.insert(0, {path!r})
try:
    from mcp.server.fastmcp import FastMCP as Server
except ImportError:
    from mcp.server import MCPServer as Server
server = Server("numbers")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("it failed")

server.run()
'''


def test_tools_of_an_mcp_server_are_called_over_stdio(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER.format(path=str(tmp_path)))
    options = MCPTools(command=(sys.executable, str(tmp_path / "server.py")))
    schemas = {schema["function"]["name"]: schema["function"] for schema in options.tool_schemas()}
    assert set(schemas) == {"add", "fail"}
    assert schemas["add"]["description"] == "Add two numbers."

    async def play():
        factory = options.factory(None)
        await factory.start()
        try:
            environment = factory.make()
            await environment.reset({}, 0)
            calls = (ToolCall("add", {"a": 2, "b": 3}), ToolCall("fail", {}), ToolCall("add", {"a": 1}))
            return await environment.step(Action("", calls))
        finally:
            await factory.stop()

    found = asyncio.run(play())
    assert [record.outcome for record in found.info["calls"]] == ["ok", "tool_error", "tool_error"]
    assert found.observation.splitlines()[0] == "5"
    assert "error: Error executing tool fail" in found.observation

    async def gone():
        factory = MCPTools(command=(sys.executable, "-c", "raise SystemExit(3)")).factory(None)
        try:
            await asyncio.wait_for(factory.start(), 20)
        finally:
            await factory.stop()

    with pytest.raises((InfraError, TimeoutError)):
        asyncio.run(gone())
