"""Every command that a run prints as its next step works as it is printed."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl.cli.main import app
from verl.cli.train import training_command

USER = {"role": "user", "content": "1+2="}
ROWS = {
    "ppo": {"prompt": [USER], "answer": "3"},
    "sft": {"messages": [USER, {"role": "assistant", "content": "3"}]},
    "dpo": {"prompt": [USER], "chosen": "3", "rejected": "4"},
}
SIZES = ["trainer.total_steps=1", "trainer.num_threads=1", "trainer.eval_interval=0", "actor=pretrained"]
OF_ROOT = {
    "ppo": ["algorithm=grpo", "trainer.group_size=2", "trainer.prompts_per_step=2", "rollout.max_new_tokens=3"],
    "sft": ["trainer.batch_size=2"],
    "dpo": ["trainer.batch_size=2"],
}
OF_ROOT["ppo"] += ["trainer.eval_samples=2"]
FILES = {"ppo": "files", "sft": "sft_files", "dpo": "preference_files"}


def on_file(root: str) -> list[str]:
    """Overrides for data in a file of the working directory."""
    rows = "".join(json.dumps({**ROWS[root], "row": row}) + "\n" for row in range(4))
    Path("rows.jsonl").write_text(rows)
    length = "max_prompt_length" if root == "ppo" else "max_length"
    return [f"data={FILES[root]}", "data.train_files=[rows.jsonl]", "data.eval_files=[rows.jsonl]", f"data.{length}=40"]


def printed(root: str, model: Path, words: list[str], monkeypatch, capsys) -> list[str]:
    """The commands that a run prints at its end."""
    arguments = [f"actor.model.path={model}", *SIZES, *OF_ROOT[root], "tracker=[console]", *words]
    monkeypatch.setattr("sys.argv", [f"verl {root}", *arguments])
    training_command(root)()
    return [line.strip() for line in capsys.readouterr().out.partition("  next:\n")[2].splitlines()]


def run_all(commands: list[str]) -> dict[str, str]:
    """Run each command; returns outputs by name."""
    found = {}
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "verl"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{command}: {result.output}"
        found[words[1]] = result.output
    return found


@pytest.mark.slow
def test_the_page_the_samples_and_the_lineage_of_a_run(dir32, monkeypatch, capsys):
    words = [*on_file("ppo"), "checkpoint=sync", "tracker=[console,jsonl,report]"]
    found = run_all(printed("ppo", dir32, words, monkeypatch, capsys))
    assert list(found) == ["report", "generate", "lineage"]
    assert "<user>...<eos><assistant>" in found["generate"]


@pytest.mark.slow
def test_a_resume_under_a_longer_schedule_tells_the_learning_rates(dir32, monkeypatch, capsys):
    words = [*on_file("sft"), "actor.optimizer.schedule=linear", "checkpoint=sync", "trainer.total_steps=2"]
    arguments = [f"actor.model.path={dir32}", *SIZES, *OF_ROOT["sft"], "tracker=[console]", *words]
    monkeypatch.setattr("sys.argv", ["verl sft", *arguments])
    training_command("sft")()
    monkeypatch.setattr("sys.argv", ["verl sft", *arguments, "resume=latest", "trainer.total_steps=9"])
    training_command("sft")()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "learning rate was" in line)
    assert "trainer.total_steps" in line


@pytest.mark.slow
@pytest.mark.parametrize("root", ["sft", "dpo"])
def test_the_plan_of_a_run_counts_with_the_lengths_of_its_rows(root, dir32, monkeypatch, capsys):
    plans = []
    for length in (24, 64):
        words = [*on_file(root), f"data.max_length={length}", "checkpoint=off", f"hydra.run.dir=run{length}"]
        printed(root, dir32, words, monkeypatch, capsys)
        plans.append(json.loads(Path(f"run{length}/plan.json").read_text())["peak"])
    assert plans[0] == plans[1]
