"""Incremental saves: what did not change is shared, what changed little is a difference, and all of it comes back."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint.requests import items, request, same_bits, tensors_of
from faults.disks import RefusingDisk
from golden_run import flip_bit
from refusals import refusal

from verl.checkpoint.commit.store import OWN_BYTES, CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem, FreeSpace
from verl.checkpoint.export import export, held_directories, materialize, plain_directory
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.compare import compare
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.read.verify import verify
from verl.checkpoint.resume_point import find
from verl.checkpoint.retention import Retention, prune
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_plan import IncrementalSettings
from verl.checkpoint.save.save_request import SavedComponent, SaveRequest, TensorItem
from verl.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    NoSpaceForCheckpoint,
)
from verl.utils.orphan_cleanup import remove_unused

WEIGHTS = "actor/model.safetensors"
DELTA, BASE = f"{WEIGHTS}.delta", f"{WEIGHTS}.base"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "first": torch.randn(64, 64, generator=generator),
        "half": torch.randn(4000, generator=generator).bfloat16(),
        "frozen": torch.randn(32, 32, generator=generator),
        "count": torch.tensor(3),
    }


def trained(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """As a small learning rate leaves them."""
    return {
        name: x if name == "frozen" or not x.is_floating_point() else x * (1 + 1e-6 * step)
        for name, x in tensors.items()
    }


def save_all(
    directory: Path,
    steps: int,
    settings: IncrementalSettings | None = None,
    disk: FileSystem | None = None,
    mode: str = "sync",
) -> list[Checkpoint]:
    store = CheckpointStore(directory, disk=disk)
    with CheckpointWriter(store, mode=mode) as writer:
        for step in range(1, steps + 1):
            writer.save(request(step, trained(weights(), step), increment=settings or IncrementalSettings()))
            writer.drain()
    return store.complete(strict=True, level="full")


def assert_holds(published: Checkpoint, step: int) -> None:
    expected, found = trained(weights(), step), tensors_of(published, "actor")
    assert expected.keys() == found.keys()
    assert all(same_bits(expected[name], found[name]) for name in expected)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_increment_holds_its_step_bit_by_bit_and_a_part_of_the_bytes(tmp_path, mode):
    first, *others = save_all(tmp_path, 3, mode=mode)
    assert names(first.directory / "actor") == ["config.json", "model.safetensors"]
    for step, published in enumerate([first, *others], 1):
        assert_holds(published, step)
    for published in others:
        assert names(published.directory / "actor") == ["config.json", *(Path(p).name for p in (BASE, DELTA))]
        assert os.path.samefile(published.path(BASE), first.path(WEIGHTS))
        assert published.path(DELTA).stat().st_size < 0.7 * first.path(WEIGHTS).stat().st_size
    (entry,) = [entry for entry in others[-1].manifest.deltas if entry.path == WEIGHTS]
    assert (entry.base_checkpoint, entry.number) == (first.name, 2)
    base = first.manifest.file(WEIGHTS)
    assert base is not None
    assert entry.base_blake3 == base.blake3


def test_a_file_that_did_not_change_is_a_link_whichever_form_it_has(tmp_path):
    store = CheckpointStore(tmp_path)
    with CheckpointWriter(store, mode="sync") as writer:
        for step, version in ((1, 1), (2, 2), (3, 2)):
            same = request(step, trained(weights(), version), increment=IncrementalSettings())
            writer.save(same)
        (*_, outcome) = writer.drain()
    first, second, third = store.complete(strict=True, level="full")
    for path in (DELTA, BASE):
        assert os.path.samefile(second.path(path), third.path(path))
    assert_holds(third, 2)
    assert outcome.report is not None
    assert outcome.report.written_bytes < 1000  # trainer_state.json and a configuration
    assert first.manifest.deltas == ()


def test_retention_may_remove_the_checkpoint_that_the_base_comes_from(tmp_path):
    save_all(tmp_path, 4)
    store = CheckpointStore(tmp_path)
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_1", "global_step_2"]
    left = store.complete(strict=True, level="full")
    for step, published in zip((3, 4), left, strict=True):
        assert_holds(published, step)
    with CheckpointWriter(CheckpointStore(tmp_path), mode="sync") as writer:  # and more are made from it
        writer.save(request(5, trained(weights(), 5), increment=IncrementalSettings()))
        writer.drain()
    newest = store.newest()
    assert_holds(newest, 5)
    assert newest.manifest.deltas[0].base_checkpoint == "global_step_1"


def test_after_so_many_saves_a_file_is_whole_again(tmp_path):
    found = save_all(tmp_path, 6, IncrementalSettings(saves_per_base=2))
    assert [published.path(WEIGHTS).exists() for published in found] == [True, False, False, True, False, False]


def test_what_is_taken_from_a_pinned_base_stays_with_it(tmp_path):
    save_all(tmp_path / "before", 2)
    base = tmp_path / "before/global_step_2"  # an increment itself: its own base serves
    found = save_all(tmp_path / "after", 3, IncrementalSettings(base=base, saves_per_base=1))
    assert all(os.path.samefile(published.path(BASE), base / BASE) for published in found)
    for step, published in enumerate(found, 1):
        assert_holds(published, step)


def test_a_pinned_base_that_is_gone_costs_a_whole_save_and_is_told(tmp_path, caplog):
    (published,) = save_all(tmp_path, 1, IncrementalSettings(base=tmp_path / "nowhere"))
    assert published.path(WEIGHTS).exists()
    assert "checkpoint.incremental_base cannot be used" in caplog.text


def test_what_does_not_pay_is_written(tmp_path):
    with CheckpointWriter(store := CheckpointStore(tmp_path), mode="sync") as writer:
        for step in (1, 2):
            noise = {"noise": torch.randn(5000, generator=torch.Generator().manual_seed(step))}
            writer.save(request(step, noise, increment=IncrementalSettings()))
        writer.drain()
    assert store.newest().manifest.deltas == ()


def test_without_links_files_are_whole(tmp_path):
    disk = RefusingDisk(link=errno.EPERM, clone=errno.EOPNOTSUPP)
    for step, published in enumerate(save_all(tmp_path, 2, disk=disk), 1):
        assert published.manifest.deltas == ()
        assert_holds(published, step)


def test_slices_of_a_tensor_are_stored_as_differences(tmp_path):
    whole = torch.randn(64, 64)
    with CheckpointWriter(store := CheckpointStore(tmp_path), mode="sync") as writer:
        for step in (1, 2):
            now = whole * (1 + 1e-6 * step)
            components = {
                f"optimizer_{rank}": SavedComponent(
                    tensors=[TensorItem(name=f"part_{rank}", tensor=half, shape=(32, 64), start=(0, 0))],
                    file="own.safetensors",
                )
                for rank, half in enumerate(now.split(32))
            }
            writer.save(SaveRequest(step=step, components=components, increment=IncrementalSettings()))
        writer.drain()
    newest = store.newest()
    assert len(newest.manifest.deltas) == 2
    for rank, half in enumerate((whole * (1 + 2e-6)).split(32)):
        assert same_bits(tensors_of(newest, f"optimizer_{rank}")[f"part_{rank}"], half)


@pytest.mark.parametrize("path", [BASE, DELTA])
def test_what_an_increment_is_made_of_is_named_where_it_is_damaged(tmp_path, path):
    *_, newest = save_all(tmp_path, 2)
    size = newest.path(path).stat().st_size
    copy = newest.path(path).read_bytes()
    newest.path(path).unlink()  # not the link of the other checkpoint
    newest.path(path).write_bytes(copy)
    flip_bit(newest.path(path), size // 2)
    assert verify(FileSystem(), newest.directory) == []  # sizes and headers are as they were
    (fault, *_) = verify(FileSystem(), newest.directory, "full")
    assert fault.file == path
    assert "actor/first" in fault.tensors
    assert "optimizer/first" not in fault.tensors
    with pytest.raises(CheckpointCorrupt, match=path.replace(".", r"\.")):
        dict(CheckpointManager(newest.directory).load("actor"))


@pytest.mark.parametrize("path", [BASE, DELTA])
def test_what_is_missing_or_cut_off_is_found_at_discovery(tmp_path, path, caplog):
    first, second = save_all(tmp_path, 2)
    content = second.path(path).read_bytes()
    second.path(path).unlink()
    store = CheckpointStore(tmp_path)
    assert store.newest().name == first.name
    assert f"global_step_2: {path}: it is missing (in actor/" in caplog.text
    second.path(path).write_bytes(content[:-1])
    with pytest.raises(CheckpointCorrupt, match="bytes instead of"):
        store.newest(strict=True)


@pytest.mark.parametrize("path", [BASE, DELTA])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_increment(tmp_path, path, caplog):
    *_, before, newest = save_all(tmp_path, 3)
    content = newest.path(path).read_bytes()
    newest.path(path).unlink()  # not the link of the other checkpoints
    newest.path(path).write_bytes(content)
    flip_bit(newest.path(path), len(content) // 2)
    point = find("latest", tmp_path)
    assert point is not None
    assert point.published.name == before.name
    assert f"NOT USING checkpoint {newest.directory}: {path}" in caplog.text
    assert_holds(point.published, 2)


class SmallDisk(FileSystem):
    """Has as much free as the store's own files take, and a part of what a whole save takes."""

    def space(self, path: Path) -> FreeSpace:
        return FreeSpace(OWN_BYTES + 40_000, None)


def test_an_increment_is_saved_where_a_whole_checkpoint_finds_no_room(tmp_path):
    save_all(tmp_path, 1)
    store = CheckpointStore(tmp_path, disk=SmallDisk())
    with CheckpointWriter(store, mode="sync") as writer:
        writer.save(request(2, trained(weights(), 2)))
        with pytest.raises(NoSpaceForCheckpoint):
            writer.drain()
        writer.save(request(2, trained(weights(), 2), increment=IncrementalSettings()))
        writer.drain()
    assert_holds(store.newest(), 2)


def test_an_index_that_does_not_fit_is_found_at_discovery(tmp_path):
    *_, newest = save_all(tmp_path, 2)
    flip_bit(newest.path(DELTA))
    (fault,) = verify(FileSystem(), newest.directory)
    assert (fault.file, fault.problem) == (DELTA, "it is not a delta")


def test_a_damaged_base_serves_no_further_save(tmp_path, caplog):
    *_, second = save_all(tmp_path, 2)
    flip_bit(second.path(BASE), 5000)  # that of every checkpoint
    with CheckpointWriter(store := CheckpointStore(tmp_path), mode="sync") as writer:
        writer.save(request(3, trained(weights(), 3), increment=IncrementalSettings()))
        writer.drain()
    assert "is damaged: it is written as a whole" in caplog.text
    newest = store.newest()
    assert verify(FileSystem(), newest.directory, "full") == []
    assert newest.path(WEIGHTS).exists()
    assert_holds(newest, 3)


def test_a_base_is_read_in_any_part(tmp_path):
    *_, newest = save_all(tmp_path, 2)
    reader = CheckpointReader(newest)
    (tensor,) = [tensor for tensor in reader.tensors("actor") if tensor.name == "first"]
    part = reader.assemble(tensor, (3, 5), (7, 11))
    expected = trained(weights(), 2)["first"][3:10, 5:16].contiguous()
    assert bytes(part) == expected.numpy().tobytes()


def test_written_out_it_is_what_a_whole_save_would_have_been(tmp_path):
    *_, newest = save_all(tmp_path / "increments", 2)
    with CheckpointWriter(CheckpointStore(tmp_path / "whole"), mode="sync") as writer:
        writer.save(request(2, trained(weights(), 2)))
        (outcome,) = writer.drain()
    assert outcome.report is not None
    out = materialize(CheckpointReader(newest), tmp_path / "out")
    assert verify(FileSystem(), out.directory, "full") == []
    for path in (WEIGHTS, "actor/config.json", "optimizer/optimizer.safetensors"):
        assert out.path(path).read_bytes() == (outcome.report.directory / path).read_bytes()
    assert compare(newest, out) == []
    with refusal("OUT"):
        materialize(CheckpointReader(newest), tmp_path / "out")


def test_nothing_is_left_of_a_damaged_one_that_is_written_out(tmp_path):
    *_, newest = save_all(tmp_path / "increments", 2)
    flip_bit(newest.path(BASE), 5000)
    with pytest.raises(CheckpointCorrupt):
        materialize(CheckpointReader(newest), tmp_path / "out")
    assert names(tmp_path) == ["increments"]


def test_a_model_is_exported_and_opened_by_others(tmp_path, monkeypatch):
    *_, newest = save_all(tmp_path / "checkpoints", 2)
    export(CheckpointManager(newest.directory), tmp_path / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    plain = plain_directory(newest, "actor")
    assert plain == plain_directory(newest, "actor") != newest.directory / "actor"
    for directory in (plain, tmp_path / "model"):
        assert names(directory) == ["config.json", "model.safetensors"]
    from safetensors.torch import load_file

    assert all(same_bits(x, trained(weights(), 2)[name]) for name, x in load_file(plain / "model.safetensors").items())


def test_copies_of_processes_that_ended_are_removed(tmp_path, monkeypatch):
    *_, newest = save_all(tmp_path / "checkpoints", 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"verl-plain-{os.getuid()}" / "0123-actor"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"left")
    plain = plain_directory(newest, "actor")
    assert not left.exists()
    assert plain_directory(newest, "optimizer").parent == plain.parent
    assert plain.exists()  # this process uses it


USER = """
import sys, time
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.export import plain_directory
print(plain_directory(CheckpointManager(sys.argv[1]).published, "actor"), flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["ends", "is killed", "is killed beside another"])
def test_nothing_is_left_of_a_copy_whose_last_user(how, tmp_path):
    *_, newest = save_all(tmp_path / "checkpoints", 2)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", USER, str(newest.directory), "0" if how == "ends" else "600"]
    count = 2 if "another" in how else 1
    users = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        (plain,) = {Path(user.stdout.readline().strip()) for user in users}
        if how == "ends":
            assert users[0].wait(timeout=60) == 0
        for user in users:
            user.kill()
            user.wait()
            if user is not users[-1]:
                time.sleep(1.0)
                assert names(plain) == ["config.json", "model.safetensors"]
        until_gone = time.monotonic() + 60
        while names(temporary) and time.monotonic() < until_gone:
            time.sleep(0.02)
        assert names(temporary) == []
    finally:
        for user in users:
            user.kill()
            user.stdout.close()


def test_whoever_holds_the_lock_and_does_nothing_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    *_, newest = save_all(tmp_path / "checkpoints", 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("verl.checkpoint.export.LOCK_TIMEOUT_S", 0.3)
    root = tmp_path / f"verl-plain-{os.getuid()}"
    root.mkdir()
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointWriteFailed, match="another process has locked it and written nothing for 0.3 s"):
            plain_directory(newest, "actor")
    assert names(plain_directory(newest, "actor")) == ["config.json", "model.safetensors"]


def test_a_checkpoint_that_lost_a_stored_file_from_its_manifest_is_refused(tmp_path):
    *_, newest = save_all(tmp_path, 2)
    newest.path(BASE).unlink()
    with pytest.raises(CheckpointIncomplete):
        CheckpointStore(tmp_path).open(newest.name)


def test_components_of_other_types_come_back(tmp_path):
    tensors = {
        "flags": torch.tensor([True, False] * 4000),
        "long": torch.arange(4000),
        "double": torch.linspace(0, 1, 4000, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    with CheckpointWriter(store := CheckpointStore(tmp_path), mode="sync") as writer:
        for step in (1, 2):
            now = tensors | {"long": tensors["long"] + step}
            component = SavedComponent(tensors=items(now), file="all.safetensors")
            writer.save(SaveRequest(step=step, components={"buffer": component}, increment=IncrementalSettings()))
        writer.drain()
    newest = store.newest()
    assert [entry.path for entry in newest.manifest.deltas] == ["buffer/all.safetensors"]
    found = tensors_of(newest, "buffer")
    assert all(same_bits(found[name], x) for name, x in (tensors | {"long": tensors["long"] + 2}).items())


def test_a_link_that_somebody_planted_where_the_copies_go_is_neither_followed_nor_changed(tmp_path, monkeypatch):
    *_, newest = save_all(tmp_path / "checkpoints", 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = tmp_path / "mine"
    (mine / "kept").mkdir(parents=True)
    mine.chmod(0o750)
    root = tmp_path / f"verl-plain-{os.getuid()}"
    root.symlink_to(mine)
    with pytest.raises(
        CheckpointWriteFailed, match="it is not a directory of this user alone. Remove it, or set TMPDIR"
    ):
        plain_directory(newest, "actor")
    remove_unused(root)
    assert (names(mine), stat.S_IMODE(mine.stat().st_mode)) == (["kept"], 0o750)
    root.unlink()
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CheckpointWriteFailed, match="not a directory of this user alone"):
        plain_directory(newest, "actor")


@pytest.mark.parametrize("how", ["bytes", "another file", "a link", "a link in its place"])
def test_a_copy_that_was_altered_meanwhile_is_not_used(how, tmp_path, monkeypatch):
    *_, newest = save_all(tmp_path / "checkpoints", 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copy = plain_directory(newest, "actor")
    (before,) = [held_directories.pop(path) for path in list(held_directories) if path == copy]
    held = held_directories.pop(copy, None)
    assert held is None
    weights = copy / "model.safetensors"
    if how == "bytes":
        flip_bit(weights, 5000)
    elif how == "another file":
        (copy / "modeling.py").write_text("print('not ours')")
    elif how == "a link":
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
    else:
        copy.rename(tmp_path / "elsewhere")
        copy.symlink_to(tmp_path / "elsewhere")
    if how != "a link in its place":  # another process has it still
        with pytest.raises(CheckpointWriteFailed, match="it was altered, and another process uses it"):
            plain_directory(newest, "actor")
    os.close(before.fd)
    assert plain_directory(newest, "actor") == copy
    assert names(copy) == ["config.json", "model.safetensors"]
    assert not weights.is_symlink()
    materialized = export(CheckpointManager(newest.directory), tmp_path / "whole")
    assert all((copy / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in materialized)
