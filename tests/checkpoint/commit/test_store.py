"""Saving, and finding again what was saved."""

import json
import re

import numpy as np
import pytest
from checkpoint.rank_tensors import RankTensor, write_tensors
from faults.scenarios import save, version_of
from refusals import refusal
from safetensors.numpy import load_file

from verl.checkpoint.commit import rank_writer
from verl.checkpoint.commit.rank_writer import RankWriter
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import read_state
from verl.checkpoint.core.hashing import hash_buffers
from verl.checkpoint.core.manifest import FileEntry, LogicalTensor, SavedSlice
from verl.checkpoint.read.reader import open_verified
from verl.errors import CheckpointCorrupt, CheckpointIncomplete


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", run_id="run")


def test_a_checkpoint_has_the_layout_that_is_documented(store):
    checkpoint = save(store, 3200, 1)
    assert sorted(path.name for path in store.directory.iterdir()) == [
        "format.json", "global_step_3200", "latest", "run.lock", "staging",
    ]  # fmt: skip
    assert sorted(path.name for path in checkpoint.directory.iterdir()) == [
        "COMMIT", "actor", "manifest.json", "optimizer", "reference_model", "trainer_state.json",
    ]  # fmt: skip
    assert (store.directory / "latest").resolve() == checkpoint.directory
    assert load_file(checkpoint.path("actor/model-00001-of-00002.safetensors"))["first"].shape == (4, 6)
    assert json.loads((store.directory / "format.json").read_text())["run_id"] == "run"


def test_trainer_state_tells_a_person_what_this_is(store):
    with store.begin(7, tag="best") as transaction:
        state = {"epoch": 2, "loss": [1.5, float("nan")], "step": 0}
        checkpoint = transaction.commit(state=state, metrics={"reward/mean": 0.5, "kl": float("inf")})
    told = read_state(store.disk, checkpoint)
    assert {key: told[key] for key in ("step", "tag", "epoch", "loss", "sequence", "run_id", "checkpoint_version")} == {
        "step": 7, "tag": "best", "epoch": 2, "loss": [1.5, "nan"], "sequence": 1, "run_id": "run",
        "checkpoint_version": "1.0.0",
    }  # fmt: skip
    assert told["metrics"] == checkpoint.manifest.metrics == {"reward/mean": 0.5}
    open_verified(store.disk, checkpoint.directory, "full")


def test_the_newest_is_the_one_published_last_not_the_one_with_the_highest_step(store):
    for step in (100, 200, 300):
        save(store, step, step)
    resumed = CheckpointStore(store.directory, run_id="resumed")
    save(resumed, 150, 150)
    assert [(checkpoint.step, checkpoint.sequence) for checkpoint in store.complete()] == [
        (100, 1), (200, 2), (300, 3), (150, 4),
    ]  # fmt: skip
    assert store.newest().step == 150
    assert save(resumed, 200, 201).name == "global_step_200-2"
    assert version_of(store.newest()) == 201


def test_the_same_step_with_the_same_bytes_is_saved_once(store):
    first = save(store, 100, 1)
    assert save(store, 100, 1) == first
    assert [checkpoint.name for checkpoint in store.complete()] == ["global_step_100"]
    assert list((store.directory / "staging").iterdir()) == []


def test_a_tag_names_the_directory(store):
    assert save(store, 500, 1, tag="loss_0.12_step_500").name == "loss_0.12_step_500"
    assert save(store, 600, 2, tag="loss_0.12_step_500").name == "loss_0.12_step_500-2"
    assert store.newest().step == 600


@pytest.mark.parametrize("tag", ["", 5, "a/b", "..", ".hidden", "latest", "run.lock", "global_step_7", "x" * 201])
def test_a_tag_that_is_no_name_of_its_own_is_refused(tag, store):
    with refusal("tag"):
        store.begin(1, tag=tag)


def half(rank: int, extent: int = 2) -> RankTensor:
    return RankTensor(
        component="optimizer", name="m", dtype="F32", shape=(4,), start=(2 * rank,), extent=(extent,),
        data=np.full(extent, rank, np.float32),
    )  # fmt: skip


def test_slices_with_a_hole_are_not_published(store):
    with store.begin(1, rank_names=["rank_1"]) as transaction:
        write_tensors(transaction.main, "optimizer/rank_0.safetensors", [half(0)])
        other = RankWriter(transaction.directory, "rank_1")
        write_tensors(other, "optimizer/rank_1.safetensors", [half(1, extent=1)])
        with refusal("manifest.json", kind=CheckpointIncomplete):
            transaction.commit([other.report()])


def test_a_file_that_nobody_reports_or_that_changed_stops_the_commit(store):
    with store.begin(1) as transaction:
        transaction.main.write("a", [b"12"])
        (transaction.directory / "a").write_bytes(b"1")
        (transaction.directory / "b").write_bytes(b"1")
        with refusal("a", "b", kind=CheckpointIncomplete):
            transaction.commit()


WRONG = {
    "beyond the end of its file": ({"offset": 1}, r"a: a slice reaches over its end \(in c/t\)"),
    "in a file that is not there": ({"file": "b"}, r"b: a slice reaches over its end \(in c/t\)"),
    "under a key of a file without keys": ({"key": "t"}, r"a: it is not a safetensors file \(in c/t\)"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_nothing_is_published_that_discovery_would_refuse(kind, store):
    change, problem = WRONG[kind]
    with store.begin(1) as transaction:
        transaction.main.write("a", [b"\xff" * 8])
        part = SavedSlice(**{"file": "a", "offset": 0, "start": (0,), "extent": (8,)} | change)
        transaction.main.record(LogicalTensor(component="c", name="t", dtype="U8", shape=(8,), slices=(part,)))
        with pytest.raises(CheckpointCorrupt, match=problem):
            transaction.commit()
    assert store.survey() == ([], [])


def test_the_files_of_the_store_itself_are_not_written_by_others(store):
    with store.begin(1) as transaction:
        for path in ("COMMIT", "manifest.json", "trainer_state.json", "../a"):
            with pytest.raises(ValueError, match=re.escape(path.split("/")[-1])):
                transaction.main.write(path, [b"1"])


def test_a_file_from_outside_that_is_never_modified_is_linked_and_where_it_is_copied_verified(
    store, tmp_path, monkeypatch
):
    outside = tmp_path / "base.bin"
    outside.write_bytes(b"base")
    entry = FileEntry.of("base.bin", hash_buffers([b"base"]))
    with store.begin(1) as transaction:
        transaction.main.add_existing("reference_model/base.bin", outside, entry)
        first = transaction.commit()
    assert first.path("reference_model/base.bin").stat().st_ino == outside.stat().st_ino
    monkeypatch.setattr(rank_writer, "duplicate", lambda *_: False)
    with store.begin(2) as transaction:
        transaction.main.add_existing("reference_model/base.bin", outside, entry)
        second = transaction.commit()
    assert second.manifest.file("reference_model/base.bin") == first.manifest.file("reference_model/base.bin")
    outside.write_bytes(b"evil")
    with store.begin(3) as transaction, refusal("base.bin", kind=CheckpointCorrupt):
        transaction.main.add_existing("reference_model/base.bin", outside, entry)
