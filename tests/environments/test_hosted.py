"""Environments in separate processes: how they start and end; tools of a user's file."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap

import pytest
from cases import short_where
from cluster.processes_of import wait_until_gone

from verl.compose.compose import compose_root
from verl.compose.validate import refuse_here, validate
from verl.environments.base import InfraError
from verl.environments.hosted import FunctionEnvironment, PythonTools
from verl.environments.hosts.host_main import HostedAction, located
from verl.environments.hosts.host_process import PROGRAMS
from verl.environments.tool_calls import ToolCall
from verl.errors import ConfigError


@pytest.mark.slow
def test_environments_of_another_process_say_themselves_how_their_state_is_restored(tmp_path):
    kinds = {"None": None, "'stateless'": "stateless", "'deterministic'": "deterministic", "'always'": "always"}
    for number, text in enumerate(kinds):
        methods = "    def reset(self, row, seed): pass\n    def step(self, action): pass\n"
        body = f"recovery = {text}\nclass World:\n    recovery = {text}\n{methods}"
        (tmp_path / f"world{number}.py").write_text(body + "def tool():\n    pass\n")

    async def made(options):
        pool = options.factory(None)
        try:
            await pool.start()
            return pool.make().recovery
        finally:
            await pool.stop()

    def found(number, **given):
        return asyncio.run(made(FunctionEnvironment(path=f"{tmp_path}/world{number}.py:World", **given)))

    assert [found(number) for number in range(3)] == ["restart", "stateless", "deterministic"]
    assert found(0, recovery="stateless") == "stateless"
    assert asyncio.run(made(PythonTools(path=f"{tmp_path}/world1.py"))) == "stateless"
    with pytest.raises(ConfigError, match="All its public functions are tools: name none"):
        PythonTools(path=f"{tmp_path}/world1.py:tool")
    with pytest.raises(ConfigError, match="recovery is deterministic, and the attribute .* is stateless"):
        found(1, recovery="deterministic")
    with pytest.raises(ConfigError, match="recovery of its class is 'always': expected stateless, deterministic, res"):
        found(3)


TOOLS = '''
from __future__ import annotations
import enum, time

class Colour(enum.Enum):
    RED = 1

def paint(colour: Colour, times: int | None = None) -> set:
    return {f"{colour.name} {times}".encode()}

def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    a: the first one
    """
    return a + b

def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b

def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"

def down() -> str:
    """Raises what is no fault of the model."""
    raise ConnectionError("no network")

class Later:
    def __await__(self):
        yield
        return "later"

def soon() -> str:
    """Answers by what can be awaited."""
    return Later()

def _private():
    pass
'''


def test_public_functions_of_a_file_are_tools_with_schemas_and_typed_outcomes(tmp_path):
    (tmp_path / "tools.py").write_text(textwrap.dedent(TOOLS))
    options = PythonTools(path=str(tmp_path / "tools.py"), step_timeout_s=1.0)
    schemas = {schema["function"]["name"]: schema["function"] for schema in options.tool_schemas()}
    assert list(schemas) == ["paint", "add", "divide", "wait", "down", "soon"]
    assert schemas["paint"]["parameters"]["properties"]["times"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first one"},
            "b": {"type": "integer", "default": 2},
        },
        "required": ["a"],
    }
    json.dumps(schemas)

    async def play():
        from verl.environments.base import Action
        from verl.environments.tool_calls import ParseFault

        pool = options.factory(None)
        await pool.start()
        try:
            assert pool.tool_parameters == {name: schema["parameters"] for name, schema in schemas.items()}
            environment = pool.make()
            await environment.reset({}, 0)
            calls = (
                ToolCall("wait", {"seconds": 0.3}),
                ToolCall("add", {"a": 1}),
                ToolCall("divide", {"a": 1.0, "b": 0.0}),
                ToolCall("add", {"a": "x"}),
                ToolCall("wait", {"seconds": 30.0}),
                ParseFault("add(", "the parenthesis is not closed"),
                ToolCall("down", {}),
                ToolCall("soon", {}),
                ToolCall("paint", {"colour": 1}),
            )
            found = await environment.step(Action("", calls))
            assert not found.terminated
            again = await environment.step(Action("", (ToolCall("add", {"a": 5, "b": 6}),)))
            assert again.observation == "11\n"
            assert (await environment.step(Action("done", ()))).terminated
            alone = pool.make_alone()
            await alone.acquire_process()
            again = await alone.step(Action("", calls[4:5]))
            assert again.calls[0].outcome == "timeout"
            assert again.observation == "error: wait gave no answer within 1 s\n"
            await alone.close()
            return found
        finally:
            await pool.stop()

    found = asyncio.run(play())
    records = found.calls
    assert [record.outcome for record in records] == [
        "ok", "ok", "tool_error", "tool_error", "infra", "tool_error", "infra", "ok", "ok",
    ]  # fmt: skip
    assert [record.fault for record in records if record.outcome == "infra"] == ["late", "own"]
    lines = found.observation.splitlines()
    assert lines[:2] == ["waited", "3"]  # in the order of the calls, though the first came last
    assert lines[2].startswith("error: ZeroDivisionError")
    assert "argument 'a' of add: Input should be a valid integer" in lines[3]
    assert lines[3].endswith("It takes a, b")
    assert lines[4] == "InfraError: no answer within 1 s, next to other episodes"
    assert lines[5] == "error: the parenthesis is not closed"
    assert lines[-2:] == ["later", '["RED None"]']


SURVIVORS = """
import os, subprocess, sys

class World:
    def reset(self, row, seed):
        daemon = "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
        found = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True)
        with open(row["prompt_text"], "a") as file:
            file.write(found.stdout)

    def step(self, action):
        if action.text == "dies":
            os._exit(3)
        return "ok", 1.0, True, False, {}
"""


def test_processes_that_an_environment_started_end_with_it_however_it_ends(tmp_path):
    """Daemons of it, in sessions of their own, whose parent has ended: it dies, it is closed, its trainer is killed."""
    (tmp_path / "world.py").write_text(SURVIVORS)
    script = textwrap.dedent(f"""
        import asyncio, os, signal, sys
        from verl.environments.base import Action, InfraError
        from verl.environments.hosted import FunctionEnvironment

        async def play():
            pool = FunctionEnvironment(path={str(tmp_path / "world.py")!r} + ":World").factory(None)
            await pool.start()
            for name in ("dies", "closed", "killed"):
                environment = pool.make_alone()
                await environment.acquire_process()
                await environment.reset({{"prompt_text": {str(tmp_path)!r} + "/" + name}}, 0)
                if name == "dies":
                    try:
                        await environment.step(Action("dies"))
                    except InfraError as error:
                        assert error.fault == "crash", error.fault
                if name == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                await environment.close()

        asyncio.run(play())
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int((tmp_path / name).read_text()) for name in ("dies", "closed", "killed")]
    assert wait_until_gone(pids) == []


CLASSES = {
    "class Other: pass": "world.py has no World. It has: Other",
    "class World: pass": "has no reset and no step",
    "World = 3": "world.py:World is 3: expected a class",
    "class World:\n    def reset(self, row, seed): pass": "has no step",
    "class World:\n    def reset(self, row): pass\n    def step(self, action): pass":
        r"World.reset is called with \(row, seed\): too many positional arguments, World.reset\(\) at line 2 of",
    "class World:\n    def reset(self, row, seed): pass\n    def step(self): pass":
        r"World.step is called with \(action",
    "class World:\n    def __init__(self, size): pass\n    def reset(self, row, seed): pass\n    step = reset":
        r"missing a required argument: 'size'",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module', at line 1 of .*world.py",
    "class World(:": "SyntaxError",
    "import os\nos._exit(5)": r"has ended \(exit status 5\)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source", CLASSES)
def test_a_class_that_cannot_be_used_is_refused_by_name_before_anything_is_loaded(source, tmp_path):
    (tmp_path / "world.py").write_text(source)
    overrides = ["environment=function", f"environment.path={tmp_path}/world.py:World", "reward=environment"]
    run = validate(compose_root("ppo", [*overrides, "algorithm=grpo", "critic=none"]))
    with pytest.raises(ConfigError, match=CLASSES[source]) as found:
        refuse_here(run)
    assert "environment.path is" in str(found.value)


PACKAGES = {
    "Box": ("env_id=Pendulum-v1", r"environment.env_id is 'Pendulum-v1': .*actions Box\(.*expected Discrete or Text"),
    "gymnasium": ("env_id=FrozenLak-v1", "environment.env_id is 'FrozenLak-v1': .*FrozenLak"),
    "textarena": ("env_id=TicTacToe-v0", "environment.env_id is 'TicTacToe-v0'"),  # for two players
    "reasoning_gym": ("task=leg_countin", "environment.task is 'leg_countin': .*leg_countin"),
}


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("package", short_where(PACKAGES, ["Box", "gymnasium"].__contains__))
def test_a_task_that_a_package_does_not_have_is_refused_before_anything_is_loaded(package):
    given, words = PACKAGES[package]
    package = "gymnasium" if package == "Box" else package
    pytest.importorskip(package)
    overrides = [f"environment={package}", f"environment.{given}", "reward=environment", "data=episodes"]
    run = validate(compose_root("ppo", [*overrides, "algorithm=grpo", "critic=none"]))
    with pytest.raises(ConfigError, match=words):
        refuse_here(run)


def test_whatever_the_model_answers_has_a_score_in_environments_of_packages():
    pytest.importorskip("gymnasium")
    pytest.importorskip("reasoning_gym")
    game = located(str(PROGRAMS / "gymnasium_adapter.py:Text"))("FrozenLake-v1")
    task = located(str(PROGRAMS / "reasoning_gym_adapter.py:ReasoningTask"))("prime_factorization", size=2)
    for world in (game, task):
        world.reset({"index": 0, "prompt_id": 0}, 0)
        assert world.step(HostedAction("9" * 5000))[1] < 0.1
    assert task.step(HostedAction("seven"))[1] == 0.0
    assert task.step(HostedAction(task.entry["answer"]))[1] == 1.0


@pytest.mark.slow
def test_a_process_that_is_started_anew_refuses_a_file_that_was_edited_meanwhile(tmp_path):
    file = tmp_path / "world.py"
    file.write_text("class World:\n    def reset(self, row, seed): pass\n    def step(self, action): pass\n")

    async def play():
        pool = FunctionEnvironment(path=f"{file}:World").factory(None)
        await pool.start()
        try:
            await pool.release(await pool.own_host())
            file.write_text(file.read_text() + "# edited\n")
            with pytest.raises(InfraError, match=r"world\.py was changed during the run\. Restore it"):
                await pool.own_host()
        finally:
            await pool.stop()

    asyncio.run(play())
