"""Beside a running run that prunes, a search finds the newest."""

import pytest
from faults.scenarios import save

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.resolve import resolve
from verl.checkpoint.retention import Retention, prune


@pytest.mark.parametrize(
    "ask", [lambda path: CheckpointDirectory(path).newest(), lambda path: resolve("latest", path, strict=True)]
)
def test_beside_a_running_run_the_newest_is_found_where_the_ones_that_were_listed_are_pruned(
    ask, tmp_path, monkeypatch
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

    found = CheckpointDirectory.candidates
    monkeypatch.setattr(CheckpointDirectory, "candidates", lambda self: after(found(self)))
    assert ask(directory).step == 4
