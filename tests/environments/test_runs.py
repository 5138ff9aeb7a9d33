"""Whole runs with an environment, composed as the command line composes them."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.models.tiny import TinyModel
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

RATED = ["reward=length", "reward.max_tokens=6"]  # of a whole episode: some have less


def run_of(overrides, directory):
    return PPOTrainer(validate(compose_root("ppo", overrides)), BuildContext(run_dir=directory))


def tokens_of(trainer):
    prompts = trainer.train_data.collate(range(6))
    rows = trainer.sampling.generate(prompts, GenerationRequest(1, 3))
    keys = zip(rows["prompt_ids"].tolist(), rows["sample_ids"].tolist(), strict=True)
    found = {}
    for row, key in enumerate(keys):
        there = rows["turn_ids"][row] >= 0
        found[key] = rows["responses"][row][there].tolist(), rows["response_mask"][row][there].tolist()
    return found


def test_a_run_of_several_turns_trains_evaluates_and_dumps_its_episodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with run_of(GUESS, tmp_path) as trainer:
        trainer.fit()
    assert not (tmp_path / "checkpoints").exists()  # nor a journal there, which another run would take for its own
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
    rows = [json.loads(line) for line in (tmp_path / "tokens" / "step_1.jsonl").read_text().splitlines()]
    assert [row["sample_id"] for row in rows] == [0, 1, 2]
    for row in rows:
        answers = "".join(text for text, chosen in zip(row["texts"], row["mask"], strict=True) if not chosen)
        assert (0 in row["mask"]) == any(word in answers for word in ("higher", "lower", "?"))
    assert any(0 in row["mask"] for row in rows)
    assert (
        len((tmp_path / "evals" / "step_0.jsonl").read_text().splitlines()) == 3 * 15
    )  # all prompts, of which samples show 3

    from typer.testing import CliRunner

    from verl.cli.main import app

    page = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output
    assert "turnsOf(row.others.episode)" in (tmp_path / "page.html").read_text()


def test_a_policy_is_evaluated_with_its_tools_and_without_them(tmp_path):
    with run_of([*CALCULATOR, "trainer.eval_without_tools=true", "trainer.eval_samples=0", STOPS], tmp_path) as trainer:
        trainer.actor.generate = asked = Asked(trainer.actor.generate)  # type: ignore
        metrics = trainer.evaluate(0)
    assert {"eval/accuracy", "eval/accuracy_without_tools"} <= set(metrics)
    whole, bare = asked.rows
    assert "episode" in whole.non_tensor_batch
    assert "episode" not in bare.non_tensor_batch
    first = [row[turns == 0].tolist() for row, turns in zip(whole["responses"], whole["turn_ids"], strict=True)]
    alone = [row[mask].tolist() for row, mask in zip(bare["responses"], bare["response_mask"], strict=True)]
    assert [tokens[: len(own)] for tokens, own in zip(first, alone, strict=True)] == alone  # greedy: its first turn


class Asked:
    """What a role was asked for, and what it gave."""

    def __init__(self, method):
        self.method, self.rows = method, []

    def __call__(self, *args):
        found = self.method(*args)
        self.rows.append(found.result())
        return found


@pytest.fixture(scope="module")
def episodes_of(tmp_path_factory):
    """Episodes of a new run, and metrics of its first step."""

    @functools.cache
    def found(*overrides):
        directory = tmp_path_factory.mktemp("run")
        with run_of([*GUESS, *RATED, "trainer.total_steps=1", *overrides], directory) as trainer:
            tokens = tokens_of(trainer)
            trainer.fit()
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return tokens, next(line for line in lines if "episode/turns" in line)

    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharding", ["fsdp", "tp"])
def test_vllm_plays_the_episodes_of_a_sharded_actor(episodes_of, sharding):
    pytest.importorskip("vllm")
    alone, step_alone = episodes_of("sharding=none", "rollout=vllm")
    tokens, step = episodes_of(f"sharding={sharding}", "trainer.n_gpus_per_node=2", "rollout=vllm")
    assert tokens == alone
    assert step["actor/grad_norm"] == pytest.approx(step_alone["actor/grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "file", "number"),
    [
        ("## An environment of your own", "world.py", 0),
        pytest.param("## An environment of your own", "world.py", 1, marks=pytest.mark.exhaustive),
        pytest.param("## A program of your own", "agent.py", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_document_is_followed_word_for_word(section, file, number, tmp_path, monkeypatch):
    """Classes, programs and commands of docs/environments.md."""
    own = (ROOT / "docs/environments.md").read_text().partition(section + "\n")[2]
    code = own.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 15
    command = [line for line in own.splitlines() if line.startswith("verl ppo environment=")][number]
    (tmp_path / file).write_text(code)
    rows = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    overrides = [*command.split()[2:], "actor=tiny_scratch", "trainer.num_threads=1", "trainer.prompts_per_step=2"]
    overrides += ["tracker=jsonl", "checkpoint=off", "trainer.save_final=false", STOPS]
    overrides += [] if "data=files" in command else ["data.held_out=2"]
    with run_of(overrides, tmp_path) as trainer:
        result = trainer.fit()
    assert result.steps == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("episode/turns", 0) > 1 for line in lines)


def test_a_template_whose_calls_cannot_be_read_is_refused_before_weights_load(tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(TinyModel, "load_causal_lm", load)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = ["data=files", f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "reward=exact_match"]
    run = validate(
        compose_root(
            "ppo",
            [
                *SMALL,
                "environment=calculator",
                *files,
                "trainer.eval_samples=0",
                "data.max_prompt_length=30",
                "trainer.prompts_per_step=1",
            ],
        )
    )
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<call {{ c.function.name }}>"
    run = replace(run, data=replace(run.data, chat_template=f"{template}{{% endfor %}}{{% endfor %}}"))
    with pytest.raises(ConfigError, match=r"^environment\.tool_format is auto, and calls .* cannot be read back"):
        PPOTrainer(run, BuildContext(run_dir=tmp_path / "run"))


@pytest.mark.slow
def test_the_tools_of_the_environment_stand_in_the_prompts_of_the_users_files(tmp_path, caplog):
    (tmp_path / "tools.py").write_text(
        'def population(city: str) -> int:\n    """Inhabitants of a city."""\n    return 1\n'
    )
    chat = [{"role": "user", "content": "1+1="}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": chat, "answer": "2"}) + "\n")
    template = "{{ tools[0].function.name if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = ["environment=python_tools", f"environment.path={tmp_path / 'tools.py'}"]
    files = ["data=files", f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "reward=exact_match"]
    files += [f"data.eval_files=[{tmp_path / 'rows.jsonl'}]", "trainer.eval_without_tools=true"]
    files += [
        "environment.tool_format=plain",
        "data.max_prompt_length=60",
        "environment.max_tokens=90",
        "rollout.max_new_tokens=30",
    ]
    for given, prompt, is_told in ((template, "population1+1=", False), (template.partition("}}")[2], "1+1=", True)):
        caplog.clear()
        run = validate(compose_root("ppo", [*SMALL, *tools, *files, "trainer.prompts_per_step=1"]))
        run = replace(run, data=replace(run.data, chat_template=given))
        with PPOTrainer(run, BuildContext(run_dir=tmp_path / "run")) as trainer:
            found = trainer.train_data.collate([0])
            bare = trainer.eval_data_without_tools.collate([0])  # type: ignore
            assert trainer.eval_data.collate([0])["prompt_text"].tolist() == [prompt]  # type: ignore
        assert found["prompt_text"].tolist() == [prompt]
        assert bare["prompt_text"].tolist() == ["1+1="]
        assert ("The chat template does not use tools" in caplog.text) == is_told
