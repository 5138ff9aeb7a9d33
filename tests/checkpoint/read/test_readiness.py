"""A probe gets the answer that a run would get, from as few manifests as possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.scenarios import save

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.resolve import resolve
from verl.checkpoint.retention import Retention, prune


class Watched(FileSystem):
    """The real disk, and a list of the manifests that were read whole."""

    def __init__(self) -> None:
        self.manifests: list[str] = []

    def read(self, path: Path, limit: int) -> bytes:
        if path.name == "manifest.json":
            self.manifests.append(path.parent.name)
        return super().read(path, limit)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    """Twelve publications of falling steps: the order of steps and of names is not that of publication."""
    made = CheckpointStore(tmp_path)
    for step in range(12, 0, -1):
        with made.begin(step) as transaction:
            transaction.commit()
    return made


def test_one_manifest_of_many_is_read(store):
    disk = Watched()
    newest, passed_over = CheckpointDirectory(store.directory, disk).newest_and_damaged()
    assert (newest, passed_over, disk.manifests) == (store.newest(), [], ["global_step_1"])


def test_one_checkpoint_is_asked_alone(store):
    disk = Watched()
    newest, _ = CheckpointDirectory(store.directory, disk).newest_and_damaged("global_step_7")
    assert (newest.step, disk.manifests) == (7, ["global_step_7"])
    assert CheckpointDirectory(store.directory / "staging").newest_and_damaged() == (None, [])


@pytest.mark.parametrize("when", ["listed", "ordered"])
@pytest.mark.parametrize(
    "ask", [lambda path: CheckpointDirectory(path).newest(), lambda path: resolve("latest", path, strict=True)]
)
def test_beside_a_running_run_the_newest_is_found_where_the_ones_that_were_listed_are_pruned(
    ask, when, tmp_path, monkeypatch
):
    directory = tmp_path / "checkpoints"
    for step in (1, 2):
        save(CheckpointStore(directory), step, step)
    went_on = []

    def after(found):
        """What was found, before the run goes on and prunes it."""
        if not went_on:
            went_on.append(True)
            for step in (3, 4):
                save(CheckpointStore(directory), step, step)
            prune(CheckpointStore(directory), Retention(keep_last_n=2))
        return found

    method = "candidates" if when == "listed" else "newest_first"
    found = getattr(CheckpointDirectory, method)
    monkeypatch.setattr(CheckpointDirectory, method, lambda self: after(found(self)))
    assert ask(directory).step == 4
