"""A path means the checkpoint that a person would say it means."""

import json
import re

import pytest
from golden_run import golden_run
from refusals import refusal

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.resolve import SAVED, ResolvedPath, resolve, resolve_path
from verl.errors import CheckpointNotFound


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with checkpoints/ in it."""
    directory = tmp_path_factory.mktemp("locate").resolve() / "run"
    golden_run(directory / "checkpoints")
    (directory / "best").symlink_to("checkpoints/global_step_100")
    (directory / "dangling").symlink_to("checkpoints/global_step_900")
    (directory / "notes").mkdir()
    (directory / "config.yaml").write_text("a: 1\n")
    return directory


MEANT = {
    "checkpoints": None,
    "checkpoints/": None,
    "": None,
    "../run": None,
    "checkpoints/latest": "latest",
    "checkpoints/latest/": "latest",
    "checkpoints/global_step_100": "global_step_100",
    "checkpoints/global_step_100//": "global_step_100",
    "checkpoints/../checkpoints/global_step_200/.": "global_step_200",
    "best": "global_step_100",
}


@pytest.mark.parametrize("given", MEANT)
@pytest.mark.parametrize("is_relative", [True, False])
def test_a_path_means(given, is_relative, run, monkeypatch):
    monkeypatch.chdir(run)
    path = given or "." if is_relative else f"{run}/{given}"
    assert resolve_path(path) == ResolvedPath(run / "checkpoints", MEANT[given])


def test_latest_in_the_directory_itself(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    assert resolve_path("latest") == ResolvedPath(run / "checkpoints", "latest")
    assert CheckpointDirectory(run / "checkpoints").open("latest").step == 200


def test_directories_of_several_runs_are_named(tmp_path):
    for name in ("first", "second"):
        golden_run(tmp_path / "checkpoints/project" / name)
    for given in (tmp_path / "checkpoints", tmp_path / "checkpoints/project"):
        with pytest.raises(CheckpointNotFound, match=r"there are some in \S+/project/first and \S+/project/second"):
            resolve_path(given)


REFUSED = {
    "nowhere": "nowhere does not exist",
    "nowhere/latest": "nowhere/latest does not exist",
    "notes": "notes holds no checkpoints: give a directory of checkpoints, one of them, or a run",
    "config.yaml": "config.yaml is a file: give a directory",
    "config.yaml/x": "config.yaml/x does not exist",
    "dangling": "dangling is a symbolic link to checkpoints/global_step_900, which does not exist",
    "checkpoints/global_step_100/actor": "is inside the checkpoint .*/global_step_100: give that directory",
    "checkpoints/global_step_100/actor/config.json": "is inside the checkpoint .*/global_step_100",
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_path_that_means_nothing_is_refused_with_what_to_give(given, run, monkeypatch):
    monkeypatch.chdir(run)
    with pytest.raises(CheckpointNotFound) as raised:
        resolve_path(given)
    assert re.search(REFUSED[given], str(raised.value)), raised.value
    with refusal("resume"):
        resolve(given, run)


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        ({"run_id": "a"}, [1, 2]),
        ({"run_id": "b"}, [3]),
        ({"run_id": "c", "ancestors": {"a": 1}}, [1]),  # killed before its first save
        ({"run_id": "c"}, []),
    ],
)
def test_the_directory_of_a_run_means_the_newest_of_that_run_in_every_use(run, steps, tmp_path):
    for step, run_id in ((1, "a"), (2, "a"), (3, "b")):
        with CheckpointStore(tmp_path / "saved", run_id).begin(step) as transaction:
            transaction.commit()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SAVED).write_text(json.dumps({"save_dir": str(tmp_path / "saved"), **run}))
    manager = CheckpointManager(tmp_path / "run")
    assert [checkpoint.step for checkpoint in manager.list()] == steps
    if steps:
        assert manager.step == resolve(str(tmp_path / "run"), tmp_path).step == steps[-1]
    else:
        assert not manager.is_valid()
        with refusal("resume"):
            resolve(str(tmp_path / "run"), tmp_path)
