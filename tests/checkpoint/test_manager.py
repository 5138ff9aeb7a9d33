"""A checkpoint answers in plain words, and gives its tensors as they were saved."""

import pyarrow
import pytest
import torch
from faults.scenarios import WEIGHT, save
from golden_run import flip_bit, golden_run
from refusals import refusal

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.lazy_tensors import device_of
from verl.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    """Two checkpoints, at the steps 100 and 200."""
    made = CheckpointStore(tmp_path / "checkpoints")
    save(made, 100, 1)
    save(made, 200, 2)
    return made


def test_what_the_trainer_recorded_is_answered(tmp_path):
    manager = CheckpointManager(golden_run(tmp_path / "checkpoints"))
    assert (manager.step, manager.epoch, manager.get_loss()) == (200, 2, 0.375)
    assert manager.loss_history[0] == {"step": 50, "loss": 1.25}
    assert manager.metrics == {"reward/mean": 0.5, "eval/accuracy": 0.8}
    assert manager.buffer_size() == 0
    assert manager.read("scheduler/scheduler.json") == b'{"last_epoch": 200}'


def test_before_the_first_save_there_is_nothing_and_no_error(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        manager = CheckpointManager(path)
        assert not manager.is_valid()
        assert manager.list() == []
        with pytest.raises(CheckpointNotFound):
            _ = manager.step


def test_a_directory_is_its_newest_checkpoint_and_lists_all(store):
    manager = CheckpointManager(store.directory)
    assert [one.step for one in manager.list()] == [100, 200]
    assert [one.step for one in manager.list()[0].list()] == [100]
    save(store, 150, 3)
    assert CheckpointManager(store.directory / "latest").step == 150


def test_a_path_begins_at_home_as_it_does_for_a_run_and_no_other_level_is_taken(store, monkeypatch):
    monkeypatch.setenv("HOME", str(store.directory.parent))
    assert Checkpointing(save_dir="~/checkpoints").directory("any", "other") == store.directory
    manager = CheckpointManager("~/checkpoints")
    assert manager.is_valid()
    with refusal("level", value="hash"):
        manager.is_valid("hash")  # type: ignore


def test_rows_of_the_replay_buffer_are_counted_over_its_shards(store):
    with store.begin(300) as transaction:
        for number, rows in enumerate((3, 4)):
            table = pyarrow.table({"reward": list(range(rows))})
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
            transaction.main.write(f"replay_buffer/shard_{number}.arrow", [sink.getvalue()])
        transaction.commit()
    assert CheckpointManager(store.directory).buffer_size() == 7


@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_are_those_that_were_saved_by_however_many_writers(mmap, store):
    manager = CheckpointManager(store.directory)
    actor, optimizer = (manager.load(name, mmap=mmap) for name in ("actor", "optimizer"))
    expected = torch.from_numpy(WEIGHT * 2)
    assert sorted(actor) == ["first", "second"]
    for tensor in (actor["first"], actor["second"], optimizer["moment"]):
        assert torch.equal(tensor, expected)


def test_what_is_written_into_a_mapped_tensor_never_reaches_the_file(store):
    manager = CheckpointManager(store.directory)
    loaded = manager.load("actor")
    loaded["first"].mul_(0)
    assert loaded["first"].abs().sum() == 0
    assert manager.is_valid("full")


def test_a_component_that_is_not_there_is_named_unless_it_may_be_absent(store):
    manager = CheckpointManager(store.directory)
    with pytest.raises(CheckpointNotFound, match="has no component critic; it has actor, optimizer, reference_model"):
        manager.load("critic")
    assert dict(manager.load("critic", strict=False)) == {}


def test_tensors_go_where_the_map_says(store):
    manager = CheckpointManager(store.directory)
    loaded = manager.load("actor", device_map={"": "meta", "first": "cpu"})
    assert {name: tensor.device.type for name, tensor in loaded.items()} == {"first": "cpu", "second": "meta"}
    assert device_of("model.layers.1.weight", {"model": "cpu", "model.layers.1": "meta"}).type == "meta"
    assert device_of("model.layers.10.weight", {"model": "cpu", "model.layers.1": "meta"}).type == "cpu"


@pytest.mark.parametrize("mmap", [True, False])
def test_a_damaged_tensor_is_named_and_the_others_load(mmap, store):
    manager = CheckpointManager(store.directory)
    flip_bit(manager.directory / "actor/model-00002-of-00002.safetensors")
    with refusal("actor/model-00002-of-00002.safetensors", kind=CheckpointCorrupt):
        _ = manager.load("actor", mmap=mmap)["second"]
    assert torch.equal(manager.load("actor")["first"], torch.from_numpy(WEIGHT * 2))
    assert not torch.equal(manager.load("actor", verify=False)["second"], torch.from_numpy(WEIGHT * 2))


WRONG_MAPS = {
    "no device": ("somewhere", "device_map is 'somewhere': it must name a device"),
    "automatic": ("auto", "device_map is 'auto'"),
    "a hole": ({"first": "cpu"}, "device_map has no entry for second"),
}


@pytest.mark.parametrize("kind", WRONG_MAPS)
def test_a_map_without_a_place_is_refused_before_anything_is_read(kind, store):
    given, problem = WRONG_MAPS[kind]
    with pytest.raises(ConfigError, match=problem):
        CheckpointManager(store.directory).load("actor", device_map=given)
