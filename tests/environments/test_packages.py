"""Environments of real packages, each trained with for five steps; `VERL_ENVIRONMENTS_PYTHON` names an interpreter with
those that are not here. `make environments` makes one for verifiers, which needs other versions of libraries."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.trainer.ppo import PPOTrainer

STEPS = 5
STOPS = f"[{','.join(map(str, range(6, 100)))}]"  # every character ends a turn
SMALL = [
    "actor=tiny_scratch", "critic=none", "algorithm=grpo", "trainer.prompts_per_step=2", "trainer.group_size=2",
    f"trainer.total_steps={STEPS}", "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_samples=1",
    "tracker=jsonl", "trainer.save_final=false", "checkpoint=off", "trainer.sample_rows=4", "data=episodes",
    "reward=environment", f"rollout.stop_token_ids={STOPS}", "rollout.max_new_tokens=4", "data.held_out=4",
    "data.train_size=10", "data.max_prompt_length=24",
]  # fmt: skip


@functools.cache
def interpreter_with(package: str) -> str | None:
    """This interpreter, or another one; skips by name where none has the package."""
    if importlib.util.find_spec(package) is not None:
        return None
    made = Path(__file__).resolve().parents[2] / ".venv-verifiers/bin/python"
    for other in filter(None, (os.environ.get("VERL_ENVIRONMENTS_PYTHON"), made.exists() and str(made))):
        if subprocess.run([other, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0:  # type: ignore
            return other  # type: ignore
    return pytest.skip(f"{package} is not installed, here or in VERL_ENVIRONMENTS_PYTHON")


def trained(directory, overrides, python) -> tuple[list[dict], list[dict]]:
    """A training of five steps: its metrics, and the records of its episodes."""
    interpreter = [] if python is None else [f"environment.python={python}"]
    run = validate(compose_root("ppo", [*SMALL, *overrides, *interpreter]))
    with PPOTrainer(run, BuildContext(run_dir=directory)) as trainer:
        assert trainer.fit().steps == STEPS
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "episode/turns" in line]
    assert len(steps) == STEPS
    assert not any(line.get("episode/left_out") for line in steps)
    assert all(line["rollout/log_prob_gap_nats"] < 1e-4 for line in steps)
    dumped = sorted((directory / "samples").glob("step_*.jsonl"))
    return steps, [json.loads(line)["episode"] for file in dumped for line in file.read_text().splitlines()]


PACKAGES = {  # settings, how episodes end, and what an observation says
    "gymnasium": (
        ["env_id=FrozenLake-v1", "+arguments.render_mode=ansi", "max_tokens=480", "max_turns=4"],
        {"terminated", "truncated", "turns"},
        "expected an action of Discrete(4)",  # to what was not a number
    ),
    "reasoning_gym": (["task=leg_counting", "max_tokens=900"], {"terminated"}, ""),
    "textarena": (
        ["env_id=GuessTheNumber-v0", "max_turns=2", "max_tokens=1000", "max_observation_tokens=450"],
        {"terminated", "truncated", "turns"},
        "guess",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", PACKAGES)
def test_environments_of_a_package_are_trained_with(package, tmp_path):
    python, (settings, ends, words) = interpreter_with(package), PACKAGES[package]
    of_environment = [f"{'+' * item.startswith('+')}environment.{item.removeprefix('+')}" for item in settings]
    overrides = [f"environment={package}", *of_environment, "actor.model.context_length=1100"]
    _, records = trained(tmp_path, overrides, python)
    assert {record["end"] for record in records} <= ends
    assert all(0 <= record["reward"] <= 1 for record in records)
    assert any(words in (turn["observation"] or "") for record in records for turn in record["turns"])


TASKS = '''
import verifiers.v1 as vf

__all__ = ["SumTaskset", "SumEnv"]


class SumData(vf.TaskData):
    answer: str = ""


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.tools)] if USES_TOOLS else []

    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def short(self, trace) -> float:
        return 0.25


class SumTasksetConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    def load(self):
        for a in range(6):
            data = SumData(prompt=f"{a}+3=", system_prompt="Be brief.", answer=str(a + 3))
            yield SumTask(data, self.config.task)


class SumEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class SumEnv(vf.Env[SumEnvConfig]):
    """Asks twice."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("Again, please.")


if __name__ == "__main__":
    Calculator.run()
'''


@pytest.fixture
def tasks(tmp_path):
    """A module with tools and one without."""
    for name, uses_tools in (("sum_tasks", False), ("sum_tool_tasks", True)):
        (tmp_path / f"{name}.py").write_text(f"USES_TOOLS = {uses_tools}\n{textwrap.dedent(TASKS)}")
    return tmp_path


@pytest.mark.exhaustive
def test_tasks_of_verifiers_are_trained_with_in_a_chat_and_as_text(tmp_path, tasks):
    python = interpreter_with("verifiers")
    overrides = ["environment=verifiers", "environment.taskset=sum_tasks", f"environment.paths=[{tasks}]"]
    overrides += ["environment.max_tokens=100", "environment.reset_timeout_s=240", "actor.model.context_length=256"]
    run_dir = tmp_path / "chat"
    _, records = trained(run_dir, [*overrides, "data.prompt=null", "data.max_prompt_length=64"], python)
    assert {record["end"] for record in records} == {"terminated"}
    assert all(len(record["turns"]) == 2 and record["reward"] in (0.25, 1.25) for record in records)
    asked = [{"role": "user", "content": "Again, please."}]
    assert all(record["turns"][0]["observation"] == asked for record in records)
    prompts = {json.loads(line)["prompt_text"] for line in (run_dir / "samples/step_0.jsonl").read_text().splitlines()}
    assert prompts
    assert all("Be brief." in text and "+3=" in text for text in prompts)
    _, records = trained(tmp_path / "text", overrides, python)  # the prompt is a text: what is asked follows it
    assert {record["end"] for record in records} == {"terminated"}
    assert {record["turns"][0]["observation"] for record in records} == {"Again, please.\n"}
