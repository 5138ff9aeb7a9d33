"""`verl runs --prune` keeps what another run or checkpoint uses, under whatever name, and what is pinned or in use."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from cli.report.run_files import run_directory
from typer.testing import CliRunner

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.resolve import SAVED
from verl.checkpoint.retention import pin
from verl.cli.main import app
from verl.trainer.state.lineage import Lineage


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The working directory, with an old run `outputs/sft` that has weights."""
    monkeypatch.chdir(tmp_path)
    weights = run_directory(tmp_path / "outputs/sft") / "actor/model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    age(tmp_path)
    return tmp_path


def age(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            os.utime(path, (0, time.time() - 365 * 86400), follow_symlinks=False)


def names(directory: Path, path: str) -> Path:
    """A young run whose settings name a path."""
    run_directory(directory)
    tree = {"actor": {"model": {"path": path}}, "checkpoint": {"save_dir": "outputs", "name": "sft"}}
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    return directory


def save(directory: Path, run_id: str, config: dict | None = None) -> str:
    with CheckpointStore(directory, run_id=run_id).begin(step=1) as transaction:
        transaction.main.write("actor/config.json", [b"{}"])
        return transaction.commit(state={"config": config or {}}).name


def point_to(directory: Path, run_dir: Path, run_id: str) -> None:
    (run_dir / SAVED).write_text(json.dumps({"save_dir": str(directory), "run_id": run_id}))
    Lineage(directory, run_id).add("run", run_dir=str(run_dir), code={}, identity={}, parent=None)


def prune(*arguments: object, status: int = 0, answer: str = "") -> str:
    result = CliRunner().invoke(app, ["runs", *map(str, arguments), "--prune"], input=answer)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


PATHS = [
    "outputs/sft/actor", "./outputs/sft/actor", "outputs/../outputs/sft/actor", "link/actor", "{project}/link/actor",
    "../outputs/sft/actor", "{project}/outputs/sft/../sft/actor", "outputs/sft/../dpo/actor", "outputs/sft/out/data",
    "outputs/sft/samples/*.jsonl", "outputs/sft/rate.py:score", "file://{project}/outputs/sft/actor", "~/sft/actor",
    "${checkpoint.save_dir}/${checkpoint.name}/actor", "chain/actor",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_weights_that_another_run_names_stay_under_every_name_of_them(project, path, monkeypatch):
    monkeypatch.setenv("HOME", str(project / "outputs"))
    (project / "link").symlink_to("outputs/sft")
    (project / "outputs/sft/chain").symlink_to("out")
    (project / "chain").symlink_to("outputs/sft/chain")
    (project / "elsewhere").mkdir()
    (project / "outputs/sft/out").symlink_to(project / "elsewhere")
    names(project / "outputs/ppo", path.replace("{project}", str(project)))
    shown = prune("--yes")
    assert "outputs/ppo names files in it" in shown
    assert (project / "outputs/sft/actor/model.safetensors").exists()


def test_they_stay_from_another_working_directory(project, monkeypatch):
    user = names(project / "outputs/ppo", "outputs/sft/actor")
    (project / "else").mkdir()
    monkeypatch.chdir(project / "else")
    assert f"{user} names files in it" in prune(project / "outputs/sft", "--yes")


def test_a_checkpoint_elsewhere_that_names_weights_keeps_them_though_its_run_goes(project):
    user = names(project / "outputs/ppo", "none")
    save(project / "checkpoints", "b", config={"actor": {"model": {"path": "outputs/sft/actor"}}})
    point_to(project / "checkpoints", user, "b")
    age(project)
    shown = prune("--yes")
    assert "checkpoints/global_step_1 names files in it" in shown
    assert "removed outputs/ppo" in shown
    assert (project / "outputs/sft/actor").is_dir()


def test_what_no_other_names_is_listed_and_then_removed(project):
    names(project / "outputs/ppo", "outputs/other/actor")
    shown = prune(status=1, answer="n\n")
    assert shown.index("outputs/sft") < shown.index("Remove 1 run")
    assert "removed outputs/sft" in prune(answer="y\n")
    assert sorted(os.listdir(project / "outputs")) == ["ppo"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_run_with_a_pinned_checkpoint_stays(project, inside):
    run_dir = project / "outputs/sft"
    directory = run_dir / "saved" if inside else project / "saved"
    name = save(directory, "a")
    point_to(directory, run_dir, "a")
    pin(CheckpointStore(directory), name)
    age(project)
    assert f"saved/{name} is pinned" in prune("--yes")
    assert run_dir.is_dir()


@pytest.mark.parametrize("place", ["link", "pins"])
def test_a_run_whose_directory_of_checkpoints_cannot_be_read_stays_and_the_others_go(project, place):
    odd = run_directory(project / "outputs/odd")
    if place == "link":
        (project / "saved").symlink_to("saved")
    else:
        (project / "saved").mkdir()
        (project / "saved/pins").write_text("")
    (odd / SAVED).write_text(json.dumps({"save_dir": str(project / "saved"), "run_id": "a"}))
    age(project)
    shown = prune("--yes")
    assert "its checkpoints cannot be read" in shown
    assert "removed outputs/sft" in shown
    assert os.listdir(project / "outputs") == ["odd"]


def test_a_directory_of_checkpoints_with_an_impossible_name_is_none(project):
    (project / "outputs/sft" / SAVED).write_text(json.dumps({"save_dir": "x" * 300, "run_id": "a"}))
    age(project)
    assert "removed outputs/sft" in prune("--yes")


@pytest.mark.parametrize("given", [".", "link", "../outputs/sft", "actor/..", "{real}"])
def test_a_run_is_removed_under_every_name_of_it(project, given, monkeypatch):
    run_dir = project / "outputs/sft"
    monkeypatch.chdir(run_dir if given in (".", "actor/..") else project / "outputs")
    (project / "outputs/link").symlink_to("sft")
    prune(given.replace("{real}", str(run_dir)), "--yes")
    monkeypatch.chdir(project)
    assert not run_dir.exists()
    assert set(os.listdir(project / "outputs")) <= ({"link"} if given != "link" else set())


def test_a_run_within_one_goes_with_it_and_keeps_it_if_it_stays(project):
    inner, child = run_directory(project / "outputs/sft/inner"), names(project / "outputs/child", "none")
    point_to(project / "saved", inner, "a")
    origin = {"run_id": "a", "checkpoint": str(project / "saved/global_step_1"), "step": 1, "differences": {}}
    Lineage(project / "saved", "b").add("run", run_dir=str(child), code={}, identity={}, parent=origin)
    age(inner)
    assert "it contains outputs/sft/inner" in prune("--yes")
    age(child)
    assert prune("--yes").count("removed ") == 3
    assert os.listdir(project / "outputs") == []
