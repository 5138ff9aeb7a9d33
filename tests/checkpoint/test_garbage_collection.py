"""Cleaning by hand says beforehand what it does, and leaves a living trainer alone."""

from __future__ import annotations

import pytest
from faults.scenarios import save, version_of

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.retention import Retention, clean, pin, plan


@pytest.fixture
def trainer(tmp_path) -> CheckpointStore:
    """A trainer that has saved five times, and what a dead one left."""
    store = CheckpointStore(tmp_path / "checkpoints", run_id="living")
    for version in range(1, 6):
        save(store, 100 * version, version)
    abandoned = store.directory / "staging/7-dead"
    abandoned.mkdir()
    (abandoned / "half").write_bytes(bytes(1000))
    return store


def everything(store: CheckpointStore) -> dict:
    return {path: path.lstat().st_mtime_ns for path in store.directory.rglob("*")}


def disk_bytes(store: CheckpointStore) -> int:
    files = [path.lstat() for path in store.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum({file.st_ino: file.st_size for file in files}.values())


def test_a_plan_changes_nothing_and_comes_true(trainer):
    pin(trainer, "global_step_100", "why")
    rules = Retention(keep_last_n=2)
    before = everything(trainer)
    planned = plan(CheckpointStore(trainer.directory), rules)
    assert everything(trainer) == before
    assert (planned.removed, planned.leftovers) == (("global_step_200", "global_step_300"), ("staging/7-dead",))
    assert planned.kept == {
        "global_step_100": "pinned", "global_step_400": "among the last 2", "global_step_500": "among the last 2",
    }  # fmt: skip
    size = disk_bytes(trainer)
    assert clean(CheckpointStore(trainer.directory), rules) == planned
    assert size - disk_bytes(trainer) == planned.freed_bytes > 1000
    assert [version_of(checkpoint) for checkpoint in trainer.complete()] == [1, 4, 5]


def test_a_trainer_in_the_middle_of_a_save_is_not_disturbed(trainer):
    with trainer.begin(600) as transaction:
        transaction.main.write("a", [b"1"])
        cleaning = clean(CheckpointStore(trainer.directory), Retention(keep_last_n=2))
        assert cleaning.leftovers == ()  # `begin` removed what was abandoned, and what it made is alive
        assert transaction.commit().step == 600
    with trainer.begin(700) as transaction:
        transaction.commit()
    assert [checkpoint.step for checkpoint in trainer.complete()] == [400, 500, 600, 700]
