"""Incremental saves: files that did not change are links, changed ones are written, and all of it comes back."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint.requests import request, same_bits, tensors_of
from faults.disks import RefusingDisk
from golden_run import flip_bit

from verl.checkpoint.commit.store import OWN_BYTES, CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem, FreeSpace
from verl.checkpoint.read.reader import open_verified
from verl.checkpoint.retention import Retention, prune
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import ExistingFile, SaveRequest
from verl.errors import NoSpaceForCheckpoint

WEIGHTS = "actor/model.safetensors"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "first": torch.randn(64, 64, generator=generator),
        "half": torch.randn(4000, generator=generator).bfloat16(),
        "count": torch.tensor(3),
    }


def trained(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """As a small learning rate leaves them."""
    return {name: x * (1 + 1e-2 * step) if x.is_floating_point() else x for name, x in tensors.items()}


def save(
    directory: Path,
    versions: dict[int, int],
    increment: bool | Path = True,
    disk: FileSystem | None = None,
    mode: str = "sync",
) -> list[Checkpoint]:
    """Save at each step the weights of a version; equal versions have equal bytes."""
    store = CheckpointStore(directory, disk=disk)
    with CheckpointWriter(store, mode=mode) as writer:
        for step, version in versions.items():
            writer.save(request(step, trained(weights(), version), increment=increment))
            writer.drain()
    return [store.open(checkpoint.name, "full") for checkpoint in store.complete()]


def assert_holds(checkpoint: Checkpoint, version: int) -> None:
    expected, loaded = trained(weights(), version), tensors_of(checkpoint, "actor")
    assert expected.keys() == loaded.keys()
    assert all(same_bits(expected[name], loaded[name]) for name in expected)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_unchanged_file_is_a_link_and_a_changed_one_is_written(tmp_path, mode):
    first, second, third = save(tmp_path, {1: 1, 2: 2, 3: 2}, mode=mode)
    for checkpoint, version in ((first, 1), (second, 2), (third, 2)):
        assert_holds(checkpoint, version)
    assert not os.path.samefile(first.path(WEIGHTS), second.path(WEIGHTS))
    assert os.path.samefile(second.path(WEIGHTS), third.path(WEIGHTS))
    entry = third.manifest.file(WEIGHTS)
    assert entry.linked_from == second.name


def test_retention_may_remove_the_checkpoint_that_a_link_comes_from(tmp_path):
    save(tmp_path, dict.fromkeys((1, 2, 3, 4), 1))
    store = CheckpointStore(tmp_path)
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_1", "global_step_2"]
    left = store.open("latest", "full")
    assert_holds(left, 1)
    *_, newest = save(tmp_path, {5: 1})
    assert os.path.samefile(left.path(WEIGHTS), newest.path(WEIGHTS))


def test_a_base_is_linked_from_where_the_newest_has_other_bytes(tmp_path):
    (base,) = save(tmp_path / "before", {1: 1})
    _, other, again = save(tmp_path / "after", {1: 1, 2: 2, 3: 1}, base.directory)
    assert os.path.samefile(base.path(WEIGHTS), again.path(WEIGHTS))
    assert_holds(other, 2)
    assert_holds(again, 1)


def test_a_base_that_is_gone_costs_a_whole_save_and_is_told(tmp_path, caplog):
    (checkpoint,) = save(tmp_path, {1: 1}, tmp_path / "nowhere")
    assert_holds(checkpoint, 1)
    assert "checkpoint.incremental_base cannot be used" in caplog.text


def test_a_damaged_file_serves_no_further_save(tmp_path, caplog):
    (first,) = save(tmp_path, {1: 1})
    flip_bit(first.path(WEIGHTS), 5000)
    with CheckpointWriter(store := CheckpointStore(tmp_path), mode="sync") as writer:
        writer.save(request(2, trained(weights(), 1), increment=True))
        writer.drain()
    assert f"{WEIGHTS} of {first.directory} is damaged, and is written anew" in caplog.text
    newest = store.newest()
    open_verified(FileSystem(), newest.directory, "full")
    assert_holds(newest, 1)


class SmallDisk(FileSystem):
    """Has as much free as the store's own files take, and a part of what a whole save takes."""

    def space(self, path: Path) -> FreeSpace:
        return FreeSpace(OWN_BYTES + 10_000, None)


def test_an_increment_is_saved_where_a_whole_checkpoint_finds_no_room(tmp_path):
    save(tmp_path, {1: 1})
    store = CheckpointStore(tmp_path, disk=SmallDisk())
    with CheckpointWriter(store, mode="sync") as writer:
        writer.save(request(2, trained(weights(), 1)))
        with pytest.raises(NoSpaceForCheckpoint):
            writer.drain()
        writer.save(request(2, trained(weights(), 1), increment=True))
        writer.drain()
    assert_holds(store.newest(), 1)


@pytest.mark.parametrize("disk", [FileSystem(), RefusingDisk(link=errno.EPERM, clone=errno.EOPNOTSUPP)])
def test_a_base_that_is_removed_after_it_was_compared_costs_a_whole_file_and_not_the_save(disk, tmp_path, monkeypatch):
    (base,) = save(tmp_path / "before", {1: 1})
    store, begun = CheckpointStore(tmp_path / "after", disk=disk), CheckpointStore.begin

    def begun_after_the_removal(self, *args, **options):
        shutil.rmtree(base.directory, ignore_errors=True)
        return begun(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "begin", begun_after_the_removal)
    with CheckpointWriter(store, mode="sync") as writer:
        writer.save(request(2, trained(weights(), 1), increment=base.directory))
        assert [outcome.error for outcome in writer.drain()] == [None]
    assert_holds(store.open("latest", level="full"), 1)


def test_a_shared_file_is_that_of_the_run_whatever_was_fetched_beside_it(tmp_path):
    store = CheckpointStore(tmp_path, run_id="mine")
    for run_id, content in (("mine", b"mine"), ("another", b"another's")):
        with CheckpointStore(tmp_path, run_id=run_id, claim=store.claim_directory()).begin(1) as transaction:
            transaction.main.write("reference_model/frozen.bin", [content])
            transaction.commit()
    assert store.newest().manifest.run_id == "another"
    with CheckpointWriter(store, mode="sync") as writer:
        writer.save(SaveRequest(step=2, existing_files=[ExistingFile(path="reference_model/frozen.bin")]))
        writer.drain()
    assert store.newest().path("reference_model/frozen.bin").read_bytes() == b"mine"
