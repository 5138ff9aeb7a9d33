"""Every command that a run prints as its next step works as it is printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl.cli.main import app
from verl.cli.train import training_command

REWARD = "def rate(prompts, responses):\n    return [float(len(text) % 2) for text in responses]\n"
CLASS = """
from trainer.runs import Arbitrary, Prompts
from verl.component import component


@component
class OwnPrompts(Prompts):
    pass


@component
class OwnReward(Arbitrary):
    pass
"""
USER = {"role": "user", "content": "1+2="}
ROWS = {
    "ppo": {"prompt": [USER], "answer": "3"},
    "texts": {"prompt": "1+2=", "answer": "3"},
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


def on_file(root: str, kind: str = "") -> list[str]:
    """Overrides for data in a file of the working directory."""
    rows = "".join(json.dumps({**ROWS[kind or root], "row": row}) + "\n" for row in range(4))
    Path("rows.jsonl").write_text(rows)
    length = "max_prompt_length" if root == "ppo" else "max_length"
    key = ["data.messages_key=messages"] if root == "sft" else []
    return [
        *key,
        f"data={FILES[root]}",
        "data.train_files=[rows.jsonl]",
        "data.eval_files=[rows.jsonl]",
        f"data.{length}=40",
    ]


def printed(root: str, model: Path, words: list[str], monkeypatch, capsys) -> list[str]:
    """The commands that a run prints at its end."""
    arguments = [f"actor.model.path={model}", *SIZES, *OF_ROOT[root], "tracker=[console]", *words]
    monkeypatch.setattr("sys.argv", [f"verl {root}", *arguments])
    training_command(root)()
    lines = capsys.readouterr().out.splitlines()
    return [line.strip() for line in lines[lines.index("  next:") + 1 :]]


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
@pytest.mark.parametrize("checkpoint", ["off", "sync"])
@pytest.mark.parametrize("root", ["ppo", "sft", "dpo"])
def test_of_a_chat_model_on_a_file(root, checkpoint, dir32, monkeypatch, capsys):
    commands = printed(root, dir32, [*on_file(root), f"checkpoint={checkpoint}"], monkeypatch, capsys)
    found = run_all(commands)
    assert ("eval" in found) == (root != "dpo")  # whose own rows are pairs
    assert ("lineage" in found) == (checkpoint == "sync")
    assert "<user>...<eos><assistant>" in found["generate"]
    if root != "dpo":
        assert "on 4 rows" in found["eval"]
        assert "rows.jsonl" in found["eval"]


@pytest.mark.slow
@pytest.mark.parametrize("root", ["ppo", "sft", "dpo"])
def test_of_built_in_rows_without_checkpoints_which_are_texts(root, dir32, monkeypatch, capsys):
    found = run_all(printed(root, dir32, ["data.held_out=3", "checkpoint=off"], monkeypatch, capsys))
    assert "...\n  -> " in found["generate"]
    assert "<user>" not in found["generate"]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["off", "sync"])
@pytest.mark.parametrize(
    "words",
    [
        ["reward=function", "reward.path=rate.py:rate"],
        ["reward={_target_:own_parts.OwnReward}", "data={_target_:own_parts.OwnPrompts}"],
        [
            "environment=calculator",
            "data=calculator",
            "environment.max_tokens=40",
            "reward=function",
            "reward.path=rate.py:rate",
        ],
    ],
    ids=["function", "classes", "episodes"],
)
def test_of_code_of_the_users(words, checkpoint, dir32, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("rate.py").write_text(REWARD)
    Path("own_parts.py").write_text(CLASS)
    own = [] if any(word.startswith("data=") for word in words) else on_file("ppo", "texts")
    found = run_all(printed("ppo", dir32, [*own, *words, f"checkpoint={checkpoint}"], monkeypatch, capsys))
    assert {"eval", "generate"} <= found.keys()


@pytest.mark.slow
def test_of_an_adapter_with_its_page_and_samples(dir32, monkeypatch, capsys):
    lora = "actor.lora={_target_:verl.models.lora.LoRA,rank:2}"
    words = [*on_file("ppo"), lora, "checkpoint=off", "tracker=[console,jsonl,report]"]
    assert list(run_all(printed("ppo", dir32, words, monkeypatch, capsys))) == ["report", "samples", "eval"]


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
