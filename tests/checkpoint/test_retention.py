"""What is kept, and that two checkpoints always remain."""

import os

import pytest
from faults.scenarios import save

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.retention import Retention, prune


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Six checkpoints at the steps 100 to 600; the best by `version` is the newest."""
    directory = tmp_path_factory.mktemp("retention") / "checkpoints"
    for version in range(1, 7):
        save(CheckpointStore(directory), 100 * version, version, tag="milestone" if version == 2 else None)
    return directory


def steps_kept(six, retention: Retention) -> list[int]:
    complete = CheckpointStore(six).complete()
    kept = retention.kept(complete)
    return [checkpoint.step for checkpoint in complete if checkpoint.name in kept]


KEPT = {
    "everything": (Retention(), [100, 200, 300, 400, 500, 600]),
    "the last three and the tagged": (Retention(keep_last_n=3), [200, 400, 500, 600]),
    "never fewer than two": (Retention(keep_last_n=1), [200, 500, 600]),
    "the best": (Retention(keep_last_n=1, keep_best="version", best_mode="min"), [100, 200, 500, 600]),
    "the best by a metric nobody has": (Retention(keep_last_n=1, keep_best="reward"), [200, 500, 600]),
    "every third hundred": (Retention(keep_last_n=1, keep_every=300), [200, 300, 500, 600]),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept(kind, six):
    retention, steps = KEPT[kind]
    assert steps_kept(six, retention) == steps


def test_pruning_removes_the_files_and_what_they_shared(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for version in range(1, 5):
        save(store, version, version)
    save(store, 5, 5)
    shared = store.newest().path("reference_model/frozen.bin")
    assert shared.stat().st_nlink == 5
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_1", "global_step_2", "global_step_3"]
    assert [checkpoint.step for checkpoint in store.complete()] == [4, 5]
    assert list((store.directory / "trash").iterdir()) == []
    assert shared.stat().st_nlink == 2
    save(store, 6, 6)
    save(store, 7, 7)
    prune(store, Retention(keep_last_n=2))
    assert store.newest().path("reference_model/frozen.bin").stat().st_nlink == 2
    assert os.readlink(store.directory / "latest") == "global_step_7"


def test_a_bad_checkpoint_counts_for_nothing_and_is_left_alone(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for version in range(1, 5):
        save(store, version, version)
    (store.directory / "global_step_4/COMMIT").unlink()
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_1"]
    assert [checkpoint.step for checkpoint in store.complete()] == [2, 3]
    assert (store.directory / "global_step_4").exists()


def test_a_file_keeps_the_checkpoint_that_it_names(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for version in range(1, 4):
        save(store, version, version)
    (store.directory / "pins").mkdir()
    (store.directory / "pins/global_step_1").touch()
    assert prune(store, Retention(keep_last_n=1)) == []
    (store.directory / "pins/global_step_1").unlink()
    assert prune(store, Retention(keep_last_n=1)) == ["global_step_1"]
