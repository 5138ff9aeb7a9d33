"""Whole runs with an environment, composed as the command line composes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.rollout.base import GenerationRequest
from verl.trainer.ppo import PPOTrainer

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "actor=tiny_scratch", "critic=none", "algorithm=grpo", "trainer.prompts_per_step=4", "trainer.group_size=3",
    "trainer.total_steps=2", "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_samples=2", "tracker=jsonl",
    "trainer.save_final=false", "actor.model.context_length=160", "checkpoint=off", "trainer.sample_rows=3",
]  # fmt: skip
STOPS = f"rollout.stop_token_ids={list(range(20, 60))}".replace(" ", "")
CALCULATOR = [*SMALL, "environment=calculator", "data=calculator", "data.train_size=40", "data.held_out=5"]
GUESS = [*SMALL, "environment=guess_number", "data=guess_number", "reward=environment", "data.repeats=2", STOPS]


def run_of(overrides, directory):
    return PPOTrainer(validate(compose_root("ppo", overrides)), BuildContext(run_dir=directory))


def tokens_of(trainer):
    prompts = trainer.train_data.collate(range(6))
    rows = trainer.generate(prompts, GenerationRequest(1, 3))
    keys = zip(rows["prompt_ids"].tolist(), rows["sample_ids"].tolist(), strict=True)
    found = {}
    for row, key in enumerate(keys):
        there = rows["turn_ids"][row] >= 0
        found[key] = rows["responses"][row][there].tolist(), rows["response_mask"][row][there].tolist()
    return found


def test_a_run_of_several_turns_trains_evaluates_and_dumps_its_episodes(tmp_path):
    with run_of(GUESS, tmp_path) as trainer:
        trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "episode/turns" in line]
    assert len(steps) == 2
    assert steps[0]["episode/turns"] > 1
    assert steps[0]["rollout/log_prob_gap_nats"] < 1e-5
    assert sum(value for key, value in steps[0].items() if key.startswith("episode/end_")) == pytest.approx(1)
    assert any("eval/turns" in line and "eval/mean@2" in line for line in lines)
    dumped = (tmp_path / "samples" / "step_0.jsonl").read_text().splitlines()
    records = [json.loads(line)["episode"] for line in dumped]
    assert all(turn["observation"] in ("higher\n", "lower\n", "?\n", None) for r in records for turn in r["turns"])

    from typer.testing import CliRunner

    from verl.cli.main import app

    told = CliRunner().invoke(app, ["samples", str(tmp_path), "--turns"])
    assert told.exit_code == 0, told.output
    assert "environment" in told.output
    assert "ended by" in told.output
    page = CliRunner().invoke(app, ["samples", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output
    assert "turnsOf(row.others.episode)" in (tmp_path / "page.html").read_text()


@pytest.mark.exhaustive
def test_two_processes_draw_the_episodes_of_one(tmp_path):
    with run_of([*GUESS, "sharding=none"], tmp_path / "one") as trainer:
        alone = tokens_of(trainer)
    with run_of([*GUESS, "sharding=ddp", "trainer.n_gpus_per_node=2"], tmp_path / "two") as trainer:
        assert tokens_of(trainer) == alone


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["rollout=scripted"], "ScriptedRollout draws no turns"),
        (["trainer.rollout_ahead=1"], "trainer.rollout_ahead is 1, and episodes are not drawn ahead"),
        (["replay=tiered"], "the replay buffer does not keep the masks of episodes"),
        (["algorithm=remax"], "the greedy baseline of algorithm=remax was not tried"),
        (["algorithm=dapo"], "algorithm.selection was not tried with episodes"),
        (["rollout.min_new_tokens=2"], "a turn has no minimum"),
        (["sharding=fsdp", "trainer.n_gpus_per_node=2"], "sharding FSDP divides the actor"),
        (["environment=guess_number"], "the rows of data have no column 'secret'"),
        (["environment=none", "reward=environment"], "environment is null"),
        (["environment.max_tokens=500"], "with environment.max_tokens 500 that makes 516 tokens"),
    ],
)
def test_what_was_not_tried_with_an_environment_is_refused_by_name(overrides, fault):
    with pytest.raises(ConfigError, match=fault):
        validate(compose_root("ppo", [*CALCULATOR, *overrides]))


def test_the_document_is_followed_word_for_word(tmp_path, monkeypatch):
    """The class and the command of docs/environments.md."""
    text = (ROOT / "docs/environments.md").read_text()
    own = text[text.index("## An environment of your own") :]
    code = own.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 15
    command = next(line for line in own.splitlines() if line.startswith("verl ppo environment=function"))
    (tmp_path / "world.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    overrides = [*command.split()[2:], "actor=tiny_scratch", "trainer.num_threads=1", "trainer.prompts_per_step=2"]
    overrides += ["tracker=jsonl", "checkpoint=off", "data.held_out=2", "trainer.save_final=false", STOPS]
    with run_of(overrides, tmp_path) as trainer:
        result = trainer.fit()
    assert result.steps == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("episode/turns", 0) > 1 for line in lines)


def test_the_tools_of_the_environment_stand_in_the_prompts_of_the_users_files(tmp_path, caplog):
    (tmp_path / "tools.py").write_text(
        'def population(city: str) -> int:\n    """Inhabitants of a city."""\n    return 1\n'
    )
    chat = [{"role": "user", "content": "1+1="}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": chat, "answer": "2"}) + "\n")
    template = "{{ tools[0].function.name if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = ["environment=python_tools", f"environment.path={tmp_path / 'tools.py'}"]
    files = ["data=files", f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "reward=exact_match"]
    files += ["data.max_prompt_length=60", "environment.max_tokens=90", "rollout.max_new_tokens=30"]
    for given, prompt, is_told in ((template, "population1+1=", False), ("{{ messages[0].content }}", "1+1=", True)):
        caplog.clear()
        run = validate(compose_root("ppo", [*SMALL, *tools, *files, "trainer.prompts_per_step=1"]))
        run = replace(run, data=replace(run.data, chat_template=given))
        with PPOTrainer(run, BuildContext(run_dir=tmp_path / "run")) as trainer:
            found = trainer.train_data.collate([0])
        assert found["prompt_text"].tolist() == [prompt]
        assert ("The chat template does not use tools" in caplog.text) == is_told
