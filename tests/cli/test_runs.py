"""The list of runs, the removal of old ones, and the difference of two."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from cli.small_runs import small_run
from typer.testing import CliRunner

from verl.cli.main import app
from verl.cli.runs import last_metrics
from verl.cli.train import training_command

runner = CliRunner()
SHORT = ["tracker=jsonl", "trainer.total_steps=2", "trainer.save_final=false", "checkpoint.save_interval=1"]


def words_of(model, directory: Path, name: str, *overrides: str) -> list[str]:
    return [*small_run(model, directory), *SHORT, f"checkpoint.save_dir={directory / 'saved' / name}", *overrides]


@pytest.fixture(scope="module")
def trained(model32, tmp_path_factory) -> Path:
    """Two equal runs, and one resumed from the first at another rate."""
    directory = tmp_path_factory.mktemp("trained")
    resumed = f"resume={directory / 'saved/first/global_step_1'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for name, overrides in (("first", ()), ("same", ()), ("second", (resumed, "actor.optimizer.lr=2e-3"))):
            words = [*words_of(model32, directory, name, *overrides), f"hydra.run.dir={directory / name}"]
            patch.setattr("sys.argv", ["verl ppo", *words])
            training_command("ppo")()
    return directory


@pytest.fixture
def killed(fork_server, model32, trained) -> Path:
    """The directory of those, and of one that was killed."""
    directory, words = trained, words_of(model32, trained, "killed", "trainer.total_steps=100000")
    process = fork_server.start(directory, "killed", words)
    try:
        while process.is_running() and not (directory / "killed/metrics.jsonl").is_file():
            time.sleep(0.01)
        assert {run["directory"]: run["status"] for run in listed(directory)}[f"{directory}/killed"] == "running"
    finally:
        process.kill()
        process.wait()
    return directory


@pytest.fixture
def old(trained, tmp_path) -> Path:
    """A copy of all that is a year old, and refers to itself alone."""
    copy = tmp_path / "old"
    shutil.copytree(trained, copy, symlinks=True)
    for file in copy.rglob("*"):
        if file.name in ("lineage.jsonl", "checkpoints.json", "config.yaml"):
            file.write_text(file.read_text().replace(str(trained), str(copy)))
        if file.is_file():
            os.utime(file, (0, time.time() - 365 * 86400))
    return copy


def told(*arguments: object, status: int = 0, answer: str = "") -> str:
    result = runner.invoke(app, [*map(str, arguments)], input=answer)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def listed(directory: Path) -> list[dict]:
    return json.loads(told("runs", directory, "--json"))


@pytest.mark.slow
def test_the_list_has_status_last_metrics_size_and_parent_of_every_run(trained, killed):
    runs = {Path(run["directory"]).name: run for run in listed(trained)}
    assert {name: run["status"] for name, run in runs.items()} == {
        "first": "finished", "same": "finished", "second": "finished", "killed": "killed",
    }  # fmt: skip
    assert [runs[name]["step"] for name in ("first", "second")] == [2, 2]
    assert runs["second"]["parent"]["run_id"] == runs["first"]["run_ids"][0]
    assert runs["first"]["metrics"]["reward/mean"] > 0
    assert runs["first"]["size_bytes"] == sum(x.stat().st_size for x in (trained / "first").rglob("*") if x.is_file())
    lines = told("runs", trained).splitlines()
    (line,) = (line for line in lines if line.startswith(str(trained / "second")))
    assert "finished" in line
    assert "reward/mean" in line
    assert f"step 1 of {trained}/first" in line


def test_without_a_run_and_without_a_directory_that_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told("runs") == "There are no runs below outputs or multirun.\n"
    assert "no such directory" in told("runs", "absent", status=2)


def test_the_last_metrics_are_read_past_half_a_line_and_hostile_ones(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "a": 1}', "[]", '{"step": 2, "b": "nan"}', "\x1b[2J", '{"step": 3, "a": 2', '{"step": 3, "c']
    file.write_text("\n".join(lines))
    assert last_metrics(file) == (2, {"a": 1, "b": "nan"})
    file.write_text("x" * 300_000 + '\n{"step": 7, "a": 3}\n')
    assert last_metrics(file) == (7, {"a": 3})
    assert last_metrics(tmp_path / "absent") == (0, {})


def test_equal_runs_differ_in_nothing_but_where_they_save(trained):
    shown = told("diff", trained / "first", trained / "same", status=1).splitlines()
    assert [line.split()[0] for line in shown if not line.startswith(" ")] == [
        "settings", "code", "data", "environment", "metrics",
    ]  # fmt: skip
    assert [line.strip().split(":")[0] for line in shown if line.startswith(" ")] == ["checkpoint.save_dir"]
    assert [line.split()[1] for line in shown if not line.startswith(" ")] == ["1", *["equal"] * 4]
    assert told("diff", trained / "first", trained / "first").count("equal") == 5


def test_what_differs_is_named_and_the_first_step_that_parts(old):
    record = json.loads((old / "second/environment.json").read_text())
    record["num_threads"], record["packages"]["torch"], record["code"]["commit"] = 64, "9.9", "abc"
    (old / "second/environment.json").write_text(json.dumps(record))
    compared = json.loads(told("diff", old / "first", old / "second", "--json", status=1))
    changed = compared["differing"]
    assert changed["settings"]["actor.optimizer.lr"] == [1e-3, 2e-3]
    assert changed["environment"]["num_threads"] == [1, 64]
    assert changed["environment"]["packages.torch"][1] == "9.9"
    assert changed["code"]["commit"][1] == "abc"
    assert changed["data"] == {}
    assert compared["metrics"].startswith("step ")
    lineage = next(old.glob("saved/second/lineage.jsonl"))
    digest = next(iter(json.loads(lineage.read_text().splitlines()[0])["identity"]["actor.model.path"].values()))
    lineage.write_text(lineage.read_text().replace(digest, "0" * 64))
    assert f"  actor.model.path: {digest[:12]} -> {'0' * 12}" in told("diff", old / "first", old / "second", status=1)


def test_a_run_that_was_killed_is_compared_up_to_its_last_whole_line(old):
    file = old / "same/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    last = [json.loads(line)["step"] for line in lines][-1]
    whole = [line for line in lines if json.loads(line)["step"] < last]
    file.write_text("".join(whole) + lines[-1][:20])
    assert f"the last step is {last} in the first run" in told("diff", old / "first", old / "same", status=1)


def test_what_is_no_run_cannot_be_compared(old):
    for name, text in {"config.yaml": "- [", "environment.json": "[]", "metrics.jsonl": '{"step": []}\n'}.items():
        shutil.copytree(old / "same", old / f"bad_{name}")
        (old / f"bad_{name}" / name).write_text(text)
        assert "error: " in told("diff", old / f"bad_{name}", old / "same", status=2)
    assert "is not the directory of a run" in told("diff", old / "same", old, status=2)
