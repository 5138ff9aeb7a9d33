"""Whatever happens to a published checkpoint afterwards is named, and it is not loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint import test_manager
from faults.scenarios import save, save_images, version_of

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.read.reader import CheckpointReader, Level, open_verified
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointTooNew,
    FileFault,
)

store = test_manager.store  # a fixture
SHARD, SLICES = "actor/model-00001-of-00002.safetensors", "optimizer/optim_state_rank_1.safetensors"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def swap(directory: Path) -> None:
    one, two = (directory / f"optimizer/optim_state_rank_{rank}.safetensors" for rank in (0, 1))
    assert one.stat().st_size == two.stat().st_size
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def edit_manifest(directory: Path, change: Callable[[dict], None], is_hidden: bool) -> None:
    """Edit it, and let COMMIT agree where the edit is to be hidden."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    path.write_bytes(data)
    if is_hidden:
        (directory / "COMMIT").write_text(f"{digest_of(data)}  manifest.json\n")


QUICK = {
    "a truncated file": (lambda d: truncate(d / SHARD), SHARD),
    "a missing file": (lambda d: (d / SLICES).unlink(), SLICES),
    "a foreign file": (lambda d: (d / "actor/extra.bin").write_bytes(b"1"), "actor/extra.bin"),
    "a file that is a link now": (lambda d: replace_by_symlink(d / "actor/config.json"), "actor/config.json"),
    "a missing COMMIT": (lambda d: (d / "COMMIT").unlink(), "COMMIT"),
    "an edited COMMIT": (lambda d: flip(d / "COMMIT", 3), "manifest.json"),
    "an empty COMMIT": (lambda d: (d / "COMMIT").write_bytes(b""), "manifest.json"),
    "a huge COMMIT": (lambda d: (d / "COMMIT").write_bytes(bytes(10_000)), "COMMIT"),
    "a missing manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
    "an edited manifest": (lambda d: edit_manifest(d, lambda m: m.update(step=1), False), "manifest.json"),
    "a manifest that is a directory": (lambda d: replace_by_directory(d / "manifest.json"), "manifest.json"),
    "everything gone": (lambda d: empty(d), "COMMIT"),
    "a header that was damaged": (lambda d: flip(d / SHARD, 12), SHARD),
}


def replace_by_symlink(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def verify(directory: Path, level: Level = "quick") -> tuple[FileFault, ...]:
    """All faults of a checkpoint."""
    try:
        open_verified(FileSystem(), directory, level)
    except BadCheckpoint as error:
        return error.faults
    return ()


@pytest.mark.first_rows(6)
@pytest.mark.parametrize("kind", QUICK)
def test_damage_that_shows_from_outside_is_found_by_every_discovery(kind, store, caplog):
    damage, file = QUICK[kind]
    directory = store.directory / "global_step_200"
    damage(directory)
    assert file in {fault.file for fault in verify(directory)}
    assert store.newest().step == 100
    assert "NOT USING checkpoint" in caplog.text
    assert file in caplog.text
    with pytest.raises(BadCheckpoint, match=f"global_step_200.*{file.split('/')[-1]}"):
        store.open("global_step_200")
    assert save(CheckpointStore(store.directory), 200, 3).name == "global_step_200-2"


def test_a_single_bit_anywhere_is_found_and_the_file_named(store):
    newest = store.newest()
    for entry in newest.manifest.files:
        path = newest.path(entry.path)
        original = path.read_bytes()
        for at in {0, entry.size // 3, entry.size - 1}:
            flip(path, at)
            assert {fault.file for fault in verify(newest.directory, "full")} == {entry.path}, at
            path.write_bytes(original)
    assert verify(newest.directory, "full") == ()


def test_a_flipped_bit_names_the_one_tensor_that_holds_it(store):
    newest = store.newest()
    place = {tensor.full_name: (tensor, tensor.slices[0]) for tensor in newest.manifest.tensors}
    for name, (tensor, part) in place.items():
        path = newest.path(part.file)
        flip(path, part.offset + tensor.slice_bytes(part) // 2)
        (fault,) = verify(newest.directory, "full")
        assert (fault.file, fault.tensors) == (part.file, (name,))
        with pytest.raises(CheckpointCorrupt, match=f"not those that were written .in {name}.$"):
            CheckpointReader(newest).tensor(tensor.component, tensor.name)
        flip(path, part.offset + tensor.slice_bytes(part) // 2)


def test_what_is_not_read_is_not_hashed(store):
    newest = store.newest()
    flip(newest.path(SLICES), -1)
    reader = CheckpointReader(newest)
    assert len(reader.tensor("actor", "first")) == 96
    assert len(CheckpointReader(newest, verify=False).tensor("optimizer", "moment")) == 96
    with pytest.raises(CheckpointCorrupt, match="optimizer/moment"):
        reader.tensor("optimizer", "moment")


def test_swapped_files_are_both_named(store):
    swap(store.directory / "global_step_200")
    files = {fault.file for fault in verify(store.directory / "global_step_200", "full")}
    assert files == {f"optimizer/optim_state_rank_{rank}.safetensors" for rank in (0, 1)}


def test_a_file_cut_off_while_it_is_open_is_no_data(store):
    newest = store.newest()
    truncate(newest.path(SHARD))
    with pytest.raises(CheckpointCorrupt, match="bytes instead of"):
        CheckpointReader(newest).tensor("actor", "first")
    newest.path(SHARD).unlink()
    with pytest.raises(CheckpointIncomplete, match="No such file"):
        CheckpointReader(newest).tensor("actor", "first")


def remove_a_slice(manifest: dict) -> None:
    (tensor,) = [tensor for tensor in manifest["tensors"] if tensor["name"] == "moment"]
    tensor["slices"].pop()


def double_a_slice(manifest: dict) -> None:
    (tensor,) = [tensor for tensor in manifest["tensors"] if tensor["name"] == "moment"]
    tensor["slices"][0]["extent"] = [4, 6]


HIDDEN = {
    "a slice is missing": (remove_a_slice, "12 of its 24 elements are in no slice"),
    "slices overlap": (double_a_slice, "overlap"),
    "a path leads outside": (lambda m: m["files"][0].update(path="../../etc/passwd"), "not normalised"),
    "a path is absolute": (lambda m: m["files"][0].update(path="/etc/passwd"), "not a relative path"),
    "a size was edited": (lambda m: m["files"][0].update(size=1), "are not those of its leaves"),
    "a tensor starts elsewhere": (lambda m: m["tensors"][0]["slices"][0].update(offset=0), "its header does not hold"),
    "a slice lies in no file": (lambda m: m["tensors"][0]["slices"][0].update(file="gone"), "gone: "),
    "no files at all": (lambda m: m.pop("files"), "not a manifest of a checkpoint"),
    "a step that is not a number": (lambda m: m.update(step="many"), "not a manifest of a checkpoint"),
    "another format": (lambda m: m["format"].update(name="other"), "its format is 'other'"),
    "a version that is none": (lambda m: m["format"].update(version="new"), "not a manifest of a checkpoint"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_manifest_that_contradicts_itself_is_refused_even_where_commit_agrees(kind, store):
    change, problem = HIDDEN[kind]
    edit_manifest(store.directory / "global_step_200", change, is_hidden=True)
    with pytest.raises(BadCheckpoint, match=problem):
        store.open("global_step_200")


@pytest.mark.parametrize("version", ["2.0.0", "10.1.0", "7.2"])
def test_a_later_format_is_refused_and_nothing_older_taken_in_its_place(version, store):
    edit_manifest(store.directory / "global_step_200", lambda m: m["format"].update(version=version), is_hidden=True)
    for use in (store.newest, lambda: save(CheckpointStore(store.directory), 300, 3)):
        with pytest.raises(CheckpointTooNew, match=rf"format {version}; this version of verl reads up to 1\.0\.0"):
            use()
    assert [checkpoint.step for checkpoint in store.complete()] == [100]


def test_an_unknown_key_is_passed_over(store):
    def add(manifest: dict) -> None:
        manifest["tiers"] = ["cold"]
        manifest["files"][0]["compression"] = "none"

    edit_manifest(store.directory / "global_step_200", add, is_hidden=True)
    assert version_of(store.newest()) == 2


@pytest.mark.parametrize("target", ["nowhere", "global_step_100", "latest", "/etc"])
def test_latest_is_a_hint_and_never_trusted(target, store):
    link = store.directory / "latest"
    link.unlink()
    link.symlink_to(target)
    assert store.newest().step == store.open("latest").step == 200


def test_latest_may_be_a_directory_somebody_made(store, caplog):
    (store.directory / "latest").unlink()
    (store.directory / "latest").mkdir()
    assert save(store, 300, 3).step == store.newest().step == 300
    assert "latest does not point to" in caplog.text


@pytest.mark.parametrize("left", ["a link", "a file"])
def test_what_stands_in_the_place_of_a_checkpoint_is_named_and_not_followed(left, store, tmp_path, caplog):
    place = store.directory / "global_step_200"
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved") if left == "a link" else place.write_text("")
    assert store.newest().step == 100
    assert f"NOT USING checkpoint {place}" in caplog.text
    assert save(store, 200, 3).name == "global_step_200-2"


def test_foreign_directories_and_files_are_passed_over_in_silence(store, caplog):
    (store.directory / "notes").mkdir()
    (store.directory / "notes/todo.txt").write_text("train more")
    (store.directory / "README").write_text("mine")
    assert [checkpoint.step for checkpoint in store.complete()] == [100, 200]
    assert caplog.text == ""


def test_a_checkpoint_may_be_moved(store, tmp_path):
    shutil.copytree(store.directory / "global_step_200", tmp_path / "elsewhere/other_name")
    assert version_of(CheckpointStore(tmp_path / "elsewhere").open("other_name")) == 2


def test_a_damaged_constant_file_is_not_handed_on(store):
    flip(store.newest().path("actor/tokenizer.json"), 0)
    third = save_images(store, 300, 3)
    assert verify(third.directory, "full") == ()
    assert {fault.file for fault in verify(store.directory / "global_step_200", "full")} == {"actor/tokenizer.json"}
    fourth = save_images(store, 400, 4)
    assert fourth.path("actor/tokenizer.json").samefile(third.path("actor/tokenizer.json"))


def test_where_there_is_nothing_it_is_said(tmp_path):
    for directory in (tmp_path, tmp_path / "not there"):
        assert CheckpointStore(directory).complete() == []
        with pytest.raises(CheckpointNotFound, match="holds no complete checkpoint"):
            CheckpointStore(directory).newest()
    assert not (tmp_path / "not there").exists()


def test_reading_a_read_only_directory_changes_nothing(store):
    def times() -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for path in store.directory.rglob("*")}

    before = times()
    reader: Checkpoint = CheckpointStore(store.directory).newest()
    assert version_of(reader) == 2
    assert times() == before
