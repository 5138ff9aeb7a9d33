"""From live tensors to a published checkpoint, in another process and in this one."""

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoint.requests import request, same_bits, tensors_of
from faults.process_disks import SLEEP, SlowDisk
from safetensors.torch import load_file

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.reader import open_verified
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import ExistingFile, SaveRequest
from verl.checkpoint.save.snapshot import DTYPES, PartialTensor, SavedComponent, lay_out_request
from verl.errors import CheckpointIncomplete, CheckpointNotFound, CheckpointWriteFailed


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", run_id="run")


@pytest.fixture
def slow_store(tmp_path, monkeypatch) -> CheckpointStore:
    monkeypatch.setenv(SLEEP, "0.03")
    return CheckpointStore(tmp_path / "checkpoints", run_id="run", disk=SlowDisk())


def every_kind() -> dict[str, torch.Tensor]:
    """Every type, and every way in which a tensor can lie in memory."""
    torch.manual_seed(0)
    noise = torch.randint(0, 256, (37, 8), dtype=torch.uint8)
    kinds = {str(dtype): (noise > 127) if dtype == torch.bool else noise.view(dtype) for dtype in DTYPES}
    whole = torch.randn(6, 700, 700)
    return kinds | {
        "no dimensions": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(3, 0, 5),
        "transposed": whole[0].T,
        "every second": whole[1, ::2, ::3],
        "expanded": torch.arange(5.0).expand(4, 5),
        "part of another": whole[2],
        "tied": whole[2],
        "parameter": torch.nn.Parameter(whole[3]),
        "larger than a chunk": torch.randn(5_000_000),
        "negated": torch._neg_view(torch.randn(4)),
    }


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_is_read_equals_what_was_saved_bit_by_bit(store, mode):
    tensors = every_kind()
    with CheckpointWriter(store, mode=mode) as writer:
        writer.prepare(request(7, tensors))
        writer.save(request(7, tensors))
        (outcome,) = writer.drain()
    assert (outcome.step, outcome.error, outcome.name) == (7, None, "global_step_7")
    checkpoint = store.newest()
    open_verified(store.disk, checkpoint.directory, "full")
    found = tensors_of(checkpoint, "actor")
    assert found.keys() == tensors.keys()
    assert [name for name in tensors if not same_bits(found[name], tensors[name])] == []
    loaded = load_file(checkpoint.path("actor/model.safetensors"))
    assert same_bits(loaded["transposed"], tensors["transposed"].contiguous())
    assert json.loads(checkpoint.path("actor/config.json").read_bytes()) == {"step": 7}


def test_a_model_is_cut_into_shards_with_an_index(store):
    tensors = {f"layer.{n}": torch.randn(1000) for n in range(5)}
    with CheckpointWriter(store) as writer:
        actor = SavedComponent(tensors=tensors, max_shard_bytes=8000)
        writer.save(SaveRequest(step=1, components={"actor": actor}))
        (outcome,) = writer.drain()
    index = json.loads((outcome.directory / "actor/model.safetensors.index.json").read_bytes())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(outcome.directory / "actor" / file)[name], tensors[name])


def test_weights_may_change_once_they_are_copied(slow_store):
    weight = torch.zeros(2_000_000)
    with CheckpointWriter(slow_store) as writer:
        for step in range(1, 5):
            writer.save(request(step, {"weight": weight}))
            writer.wait_copied()
            weight += 1
        assert len(writer.drain()) == 4
    for step, checkpoint in enumerate(slow_store.complete(), 1):
        assert set(tensors_of(checkpoint, "actor")["weight"].tolist()) == {step - 1.0}


def test_a_third_save_waits_and_memory_stays_at_two_host_buffers(slow_store):
    weight, before = torch.zeros(1_000_000), _host_buffers()
    with CheckpointWriter(slow_store) as writer:
        for step in range(1, 6):
            writer.save(request(step, {"weight": weight}))
            assert writer.num_under_way <= 2
            assert len(_host_buffers() - before) <= 2
        assert [outcome.step for outcome in writer.drain()] == [1, 2, 3, 4, 5]
    assert not _host_buffers() - before


class Unreadable(torch.Tensor):
    """Fails when it is copied."""

    def is_contiguous(self, *args, **kwargs):
        raise RuntimeError("the memory of this tensor is gone")


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(3).as_subclass(Unreadable), RuntimeError),
        (PartialTensor(tensor=torch.ones(2), shape=(4,), start=(0,)), CheckpointIncomplete),
    ],
)
def test_a_failed_save_is_told_by_the_next_poll_and_the_following_one_works(tensor, kind, store, mode):
    with CheckpointWriter(store, mode=mode) as writer:
        actor = SavedComponent(tensors={"weight": tensor}, file="half.safetensors")
        writer.save(SaveRequest(step=1, components={"actor": actor}))
        writer.wait_copied()
        with pytest.raises(kind):
            writer.drain()
        writer.save(request(2, {"weight": torch.ones(2)}))
        writer.drain()
    assert [checkpoint.step for checkpoint in store.complete()] == [2]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_for_which_there_is_no_memory_is_told_in_words(mode, store, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with CheckpointWriter(store, mode=mode) as writer:
        with contextlib.suppress(CheckpointWriteFailed):  # of the call itself, without a thread
            writer.save(request(1, {"weight": torch.ones(3)}))
        with pytest.raises(CheckpointWriteFailed, match="no main memory for a copy of .* MiB"):
            writer.drain()


def freed() -> torch.Tensor:
    """As FSDP leaves the parameters that it has put together for a while."""
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (SavedComponent(tensors={"z": torch.zeros(2, dtype=torch.complex64)}), "complex64, which safetensors"),
        (SavedComponent(tensors={"m": torch.zeros(2, device="meta")}), "not a dense tensor"),
        (SavedComponent(tensors={"f": freed()}), "not a dense tensor"),
        (SavedComponent(tensors={"s": PartialTensor(tensor=torch.zeros(2), shape=(4,), start=(0,))}), "Give the"),
        (SavedComponent(tensors={"a": torch.zeros(1)}, file="f", files={"f": b""}), "twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_refused_by_the_call(component, message):
    with pytest.raises(ValueError, match=message):
        lay_out_request(SaveRequest(step=1, components={"actor": component}))


def test_files_that_are_there_already_are_shared_and_checked(store, tmp_path):
    outside = tmp_path / "tokenizer.model"
    outside.write_bytes(b"outside")
    with CheckpointWriter(store) as writer:
        first = SaveRequest(step=1, components={"reference": SavedComponent(tensors={"w": torch.ones(3)})})
        writer.save(first)
        writer.drain()
        link = ExistingFile(path="reference/model.safetensors")
        copied = ExistingFile(path="actor/tokenizer.model", source=outside)
        writer.save(SaveRequest(step=2, existing_files=[link, copied], components={"actor": SavedComponent()}))
        writer.drain()
        outside.write_bytes(b"changed")  # its owner may
        writer.save(SaveRequest(step=3, existing_files=[link, ExistingFile(path="actor/tokenizer.model")]))
        writer.drain()
        writer.save(SaveRequest(step=4, existing_files=[ExistingFile(path="reference/missing")]))
        with pytest.raises(CheckpointNotFound, match="has no file reference/missing to share"):
            writer.drain()
    newest = store.newest()
    assert torch.equal(tensors_of(newest, "reference")["w"], torch.ones(3))
    assert newest.path("actor/tokenizer.model").read_bytes() == b"outside"
    assert newest.path("reference/model.safetensors").stat().st_nlink == 3


def test_constant_files_are_shared_between_saves(store):
    with CheckpointWriter(store) as writer:
        for step in (1, 2):
            actor = SavedComponent(constant_files={"tokenizer.json": b"same"}, files={"step": bytes([step])})
            writer.save(SaveRequest(step=step, components={"actor": actor}))
            writer.drain()
    first, second = store.complete()
    assert first.path("actor/tokenizer.json").samefile(second.path("actor/tokenizer.json"))


def test_closing_finishes_what_is_under_way_and_leaves_nothing(slow_store):
    open_before = set(os.listdir("/proc/self/fd"))
    writer = CheckpointWriter(slow_store)
    writer.save(request(1, {"weight": torch.ones(1000)}))
    writer.close()
    writer.close()
    assert slow_store.newest().step == 1
    assert writer.process_id is None
    assert set(os.listdir("/proc/self/fd")) <= open_before
    assert [outcome.step for outcome in writer.poll()] == [1]


class InterruptedDisk(FileSystem):
    """Ctrl-C comes while the first file is made."""

    def create(self, path):
        if path.name == "config.json" and not path.parents[1].name.startswith("2-"):
            raise KeyboardInterrupt
        return super().create(path)


def test_an_interrupt_during_a_save_in_this_process_leaves_the_writer_usable(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", disk=InterruptedDisk())
    with CheckpointWriter(store, mode="sync") as writer:
        with pytest.raises(KeyboardInterrupt):
            writer.save(request(1, {"weight": torch.ones(2)}))
        with pytest.raises(CheckpointWriteFailed, match="was interrupted"):
            writer.drain()
        writer.save(request(2, {"weight": torch.ones(2)}))
        assert [outcome.error for outcome in writer.drain()] == [None]


def test_a_checkpoint_is_saved_where_no_thread_can_be_started(store, monkeypatch):
    """As at the end of the interpreter, or at the limit of processes."""
    weights = {"weight": torch.randn(1 << 20)}
    with CheckpointWriter(store, mode="sync") as writer, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        writer.save(request(1, weights))
        assert [outcome.error for outcome in writer.drain()] == [None]
    assert same_bits(tensors_of(store.newest(), "actor")["weight"], weights["weight"])


def test_a_forked_child_neither_holds_the_memory_nor_disturbs_the_writer(store):
    before = _host_buffers()  # of other tests in this process, whose tensors may still be looked at
    with CheckpointWriter(store) as writer:
        writer.save(request(1, {"weight": torch.ones(100_000)}))
        writer.drain()
        own = _host_buffers() - before
        assert own
        child = os.fork()
        if child == 0:
            held = _host_buffers() & own
            writer.close()
            os._exit(bool(held))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.save(request(2, {"weight": torch.full((100_000,), 2.0)}))
        assert [outcome.num_deaths for outcome in writer.drain()] == [0]


def _host_buffers() -> set[int]:
    """Arenas that this process has mapped or opened, by their inodes."""
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "verl-checkpoint" in line)
    found = {int(entry[4]) for entry in maps}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "verl-checkpoint" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return found
