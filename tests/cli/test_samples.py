"""Rollouts of a run are browsed as a table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from trainer.runs import GRPO_ALGORITHM, JSONL, fit, ppo_run
from typer.testing import CliRunner

from verl.cli.main import app
from verl.cli.report.samples import OF_BUFFER, read_samples
from verl.replay.config import TieredReplay

runner = CliRunner()


@pytest.fixture(scope="module")
def finished(model32, tmp_path_factory) -> Path:
    """A run of three steps, which evaluated and kept its rows."""
    directory = tmp_path_factory.mktemp("samples") / "run"
    run = ppo_run(
        model32, GRPO_ALGORITHM, total_steps=3, eval_interval=1, save_final=False, tracker=JSONL,
        replay=TieredReplay(memory_mib=8, shard_mib=1),
    )  # fmt: skip
    fit(run, directory)
    return directory


def told(directory: Path, *options: str) -> str:
    result = runner.invoke(app, ["samples", str(directory), *options])
    assert result.exit_code == 0, result.output
    return result.output


def rows(directory: Path, *options: str) -> list[dict]:
    return json.loads(told(directory, "--json", "--limit", "0", *options))


def test_rows_of_the_buffer_and_of_the_dumps_are_read(finished):
    samples = read_samples(finished)
    assert {sample.source for sample in samples} == {"buffer", "eval"}
    kept = [sample for sample in samples if sample.source == "buffer"]
    assert len(kept) == 3 * 6
    assert {sample.step for sample in kept} == {1, 2, 3}
    assert all(sample.prompt and sample.length and sample.score is not None for sample in kept)
    dumped = json.loads((finished / "samples/step_2.jsonl").read_text().splitlines()[0])
    mine = next(sample for sample in samples if sample.source == "eval" and sample.step == 2)
    assert (mine.prompt, mine.response, mine.score) == (
        dumped["prompt_text"], dumped["response_text"], dumped["score"],
    )  # fmt: skip


def test_rows_are_chosen_by_reward_length_step_and_prompt(finished):
    all_rows = rows(finished)
    good = rows(finished, "--reward", "0.5:", "--sort", "-reward")
    assert [row["score"] for row in good] == sorted((r["score"] for r in all_rows if r["score"] >= 0.5), reverse=True)
    assert 0 < len(good) < len(all_rows)
    assert {row["step"] for row in rows(finished, "--step", "2:3")} == {2, 3}
    short = rows(finished, "--length", ":6")
    assert all(row["length"] <= 6 for row in short)
    text = next(row["prompt"] for row in all_rows if row["source"] == "buffer")
    assert {row["prompt"] for row in rows(finished, "--prompt", text, "--source", "buffer")} == {text}


def test_what_is_asked_wrongly_is_told_on_one_line(finished, tmp_path):
    for arguments in (["--reward", "high"], ["--sort", "beauty"]):
        result = runner.invoke(app, ["samples", str(finished), *arguments])
        assert result.exit_code == 2
        assert "expected" in result.output
    for path, told_of in ((tmp_path / "nowhere", "no such directory"), (tmp_path, "neither samples")):
        assert told_of in runner.invoke(app, ["samples", str(path)]).output


def test_the_table_has_the_columns_of_the_data_and_fits_the_terminal(finished, monkeypatch):
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = told(finished, "--source", "eval").splitlines()
        assert all(len(line) <= width for line in lines), width
        assert {"step", "reward", "prompt", "response"} <= set(lines[0].split())
    others = [key for key in rows(finished, "--source", "eval")[0]["others"] if key not in OF_BUFFER]
    assert others
    assert lines[0].split()[-len(others) :] == others  # beside the response
    assert "advantage" not in told(finished, "--source", "buffer").splitlines()[0]


def test_latest_is_the_run_that_dumped_samples_last(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing = runner.invoke(app, ["samples", "latest"])
    assert (nothing.exit_code, "no run below outputs/" in nothing.output) == (2, True)
    shutil.copytree(finished, tmp_path / "outputs/quickstart/ppo")
    assert "rows" in told(Path("latest"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_text": "a", "resp',
        pytest.param("", marks=pytest.mark.exhaustive),
        "[]",
        pytest.param("3", marks=pytest.mark.exhaustive),
        pytest.param("null", marks=pytest.mark.exhaustive),
        '{"score": "x"}',
        pytest.param('{"score": []}', marks=pytest.mark.exhaustive),
        pytest.param('{"score": 1e999}', marks=pytest.mark.exhaustive),
        "[" * 5000,
        "\x00\xff",
        '{"table": {"a": 1}, "prompt_text": 3, "response_text": null}',
        '{"episode": 3}',
        pytest.param('{"episode": {"turns": 3}}', marks=pytest.mark.exhaustive),
        '{"episode": {"turns": [3]}}',
    ],
)
def test_a_damaged_line_of_a_sample_table_costs_that_line(line, tmp_path):
    (tmp_path / "samples").mkdir()
    good = {"prompt_text": "1+1=", "response_text": "2", "score": 1}
    (tmp_path / "samples/step_1.jsonl").write_text(json.dumps(good) + "\n" + line + "\n")
    (tmp_path / "samples/step_x.jsonl").write_text(json.dumps(good) + "\n")
    for options in ((), ("--json",), ("--turns",), ("--sort", "-reward")):
        result = CliRunner().invoke(app, ["samples", str(tmp_path), *options])
        assert result.exit_code in ((0, 2) if options else (0,)), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
