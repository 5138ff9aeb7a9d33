"""The tree of runs: where each began, how it ended, what it saved, and what is left of that."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer.runs import BRIEF, BRIEF_GRPO, fit, ppo_run
from typer.testing import CliRunner

from verl.checkpoint.config import Checkpointing
from verl.cli.main import app
from verl.trainer.state.lineage import FILE, Lineage, LineageRun, forest, read_events

runner = CliRunner()


def train(model, directory: Path, name: str, resume: str | None = None, lr: float = 3e-3, **settings) -> None:
    run = ppo_run(model, BRIEF_GRPO, total_steps=4, lr=lr, save_final=False, **BRIEF, **settings)
    saving = Checkpointing(save_dir=str(directory / "saved"), save_interval=1, keep_last_n=2, save_async=False)
    fit(dataclasses.replace(run, checkpoint=saving, resume=resume), directory / name)


@pytest.fixture(scope="module")
def family(model32, tmp_path_factory) -> Path:
    """A run stopped after three steps, one that went on from its second at another rate, and one after that."""
    directory = tmp_path_factory.mktemp("family")
    train(model32, directory, "first", stop_after=3)
    train(model32, directory, "second", resume=str(directory / "saved/global_step_2"), lr=1e-3)
    train(model32, directory, "third", resume="latest", stop_after=4)
    return directory


def walk(runs: list[LineageRun]) -> Iterator[LineageRun]:
    for run in runs:
        yield run
        yield from walk(run.children)


def told(directory: Path, *options) -> str:
    result = runner.invoke(app, ["lineage", str(directory), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_children_hang_below_the_checkpoint_that_they_went_on_from_with_what_differs(family):
    (first,) = forest(family)
    (second,) = first.children
    (third,) = second.children
    assert (first.status, first.steps, first.parent) == ("stopped", 3, None)
    assert (second.status, second.steps, second.parent.step) == ("finished", 4, 2)
    assert (third.status, third.parent.step, third.checkpoints) == ("finished", 4, [])
    assert second.parent.run_id == first.run_id
    assert second.parent.differences["actor.optimizer.lr"] == [3e-3, 1e-3]
    assert second.data_changes == {}
    lines = told(family).splitlines()
    assert lines[0].startswith(f"run {first.run_id}  stopped  steps 1 to 3  20")
    assert lines[0].endswith(str(family / "first"))
    (branch,) = (line for line in lines if f"run {second.run_id}  " in line and "from step" not in line)
    assert "finished  steps 3 to 4" in branch
    assert any(line.strip(" │├─└").startswith("global_step_2") for line in lines[: lines.index(branch)])
    assert any("actor.optimizer.lr: 0.003 -> 0.001" in line for line in lines)
    assert any(f"from step 2 of run {first.run_id}" in line for line in lines)


def test_a_checkpoint_is_there_or_pruned_and_a_name_used_again_is_the_later_runs(family):
    first, second, _ = walk(forest(family))
    there = {path.name for path in (family / "saved").glob("global_step_*")}
    for run in (first, second):
        for saved in run.checkpoints:
            expected = "there" if saved.name in there else "pruned"
            is_again = run is first and saved.name in {x.name for x in second.checkpoints}
            assert saved.state == ("pruned" if is_again else expected)
    assert {saved.state for saved in first.checkpoints} >= {"pruned"}
    assert "pruned" in told(family)


def test_json_holds_the_same_tree(family):
    (first,) = json.loads(told(family, "--json"))
    assert first["children"][0]["children"][0]["parent"]["step"] == 4
    assert first["code"]["verl"]
    assert [saved["step"] for saved in first["checkpoints"]] == [1, 2, 3]


def test_the_content_of_data_that_changed_is_shown_by_its_path(tmp_path):
    def identity(digest: str) -> dict:
        return {"data.train_files": [{"blake3": digest * 64}], "algorithm.epochs": 1}

    parent = {"run_id": "a", "checkpoint": "x/global_step_1", "step": 1, "differences": {}}
    events = [
        {"event": "run", "run_id": "a", "time": "2026-01-01T00:00:00", "identity": identity("1"), "parent": None},
        {"event": "run", "run_id": "b", "time": "2026-01-02T00:00:00", "identity": identity("2"), "parent": parent},
        {"event": "run", "run_id": "c", "time": "2026-01-03", "parent": {**parent, "run_id": "elsewhere"}},
    ]
    (tmp_path / "lineage.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "ru')
    first, elsewhere = forest(tmp_path)
    assert list(first.children[0].data_changes) == ["data.train_files"]
    assert (first.status, elsewhere.run_id, elsewhere.parent.run_id) == ("running or killed", "c", "elsewhere")
    assert "content of data.train_files: 111111111111 -> 222222222222" in told(tmp_path)


def test_a_place_without_runs_or_that_is_not_there_is_told(tmp_path):
    assert told(tmp_path) == f"There are no checkpoints below {tmp_path}.\n"
    result = runner.invoke(app, ["lineage", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert "no such directory" in result.output


def test_a_checkpoint_that_a_killed_run_published_and_never_recorded_is_told_all_the_same(family, tmp_path):
    shutil.copytree(family / "saved", tmp_path / "saved", symlinks=True)
    file = tmp_path / "saved" / FILE
    events = [json.loads(line) for line in file.read_text().splitlines()]
    last = [event for event in events if event["event"] == "checkpoint"][-1]
    file.write_text("".join(json.dumps(event) + "\n" for event in events if event != last and event["event"] != "end"))
    recorded = {run.run_id: run for run in walk(forest(family))}[last["run_id"]]
    run = {run.run_id: run for run in walk(forest(tmp_path))}[last["run_id"]]
    assert [(saved.name, saved.state) for saved in run.checkpoints] == [
        (saved.name, saved.state) for saved in recorded.checkpoints
    ]
    assert (run.status, run.steps) == ("running or killed", last["step"])


def test_half_a_line_of_a_killed_run_costs_no_other_line(tmp_path):
    Lineage(tmp_path, "a").add("run")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "checkpo')
    Lineage(tmp_path, "b").add("run")
    Lineage(tmp_path, "b").add("end", status="finished", step=3)
    assert [(event["run_id"], event["event"]) for event in read_events(tmp_path)] == [
        *(("a", "run"), ("b", "run"), ("b", "end"))
    ]


def recorded(directory: Path, *events: dict) -> str:
    lines = [{"event": "run", "time": f"{number:06}", **event} for number, event in enumerate(events)]
    (directory / "lineage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = ""
    for options in ([], ["--json"]):
        result = runner.invoke(app, ["lineage", str(directory), *options])
        assert result.exit_code == 0, (result.output, result.exception)
        said += result.output
    return said


def parent(run_id: str, **changed: Any) -> dict:
    return {"parent": {"run_id": run_id, "checkpoint": "c", "step": 1, "differences": {}, **changed}}


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    "runs",
    [
        [{"run_id": "a", **parent("a")}],
        [{"run_id": "a", **parent("b")}, {"run_id": "b", **parent("c")}, {"run_id": "c", **parent("a")}],
        [{"run_id": "a"}, {"run_id": "b", **parent("c")}, {"run_id": "c", **parent("b")}],
        [{"run_id": "a", "code": {"commit": 5, "modified": [], "verl": {}}}],
        [{"run_id": "a", **parent("x", differences={"trainer.seed": [1]})}],
        [{"run_id": "a", **parent("x", differences={"trainer.seed": [1, 2, 3]})}],
        [{"run_id": "a", "identity": {"x": 3}}, {"run_id": "b", "identity": {"x": {"y": 1}}, **parent("a")}],
    ],
)
def test_cycles_and_values_of_other_types_are_shown_as_they_are(runs, tmp_path):
    said = recorded(tmp_path, *runs)
    assert all(f"run {run['run_id']} " in said for run in runs)


def test_lines_of_another_form_are_left_out(tmp_path):
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    bad = [{"event": 3}, {"run_id": 3}, {"run_id": "x", "code": 3}, {"run_id": "x", **parent("a", step="1")}]
    said = recorded(tmp_path, {"run_id": "good"}, *bad, {"run_id": "nested", "code": {"verl": deep}})
    assert "run good " in said
    assert "run x " not in said
