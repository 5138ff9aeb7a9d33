"""A tensor reads the same whatever slices it was written in, and whatever part of it is asked for."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint.rank_tensors import RankTensor, write_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint.commit.rank_writer import RankWriter
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import hash_buffers
from verl.checkpoint.core.manifest import FileEntry, LogicalTensor, Manifest, SavedSlice
from verl.checkpoint.read.lazy_tensors import LazyTensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.errors import CheckpointNotFound


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes into which cuts along every dimension divide a tensor."""
    edges = [sorted({0, size, *(cut for cut in own if cut < size)}) for size, own in zip(shape, cuts)]
    sides = [list(itertools.pairwise(own)) for own in edges]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*sides)]


class OneFile(FileSystem):
    """A disk whose only file has the content given."""

    def __init__(self, content: bytes):
        self.content = content

    def map(self, path, writable=False):
        return memoryview(self.content)


@given(st.lists(st.integers(1, 5), max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_any_part_of_any_tiling_is_that_part_of_the_tensor(shape, data):
    shape = tuple(shape)
    values = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    slices, content = [], b""
    for start, extent in grid(shape, [data.draw(st.lists(st.integers(1, 4), max_size=2)) for _ in shape]):
        slices.append(SavedSlice(file="f", offset=len(content), start=start, extent=extent))
        content += values[tuple(slice(a, a + n) for a, n in zip(start, extent))].tobytes()
    tensor = LogicalTensor(component="c", name="t", dtype="I16", shape=shape, slices=tuple(slices))
    assert tensor.faults() == []
    entry = FileEntry.of("f", hash_buffers([content]))
    manifest = Manifest(
        sequence=1, step=1, tag=None, run_id="", saved_at="", verl_version="", files=(entry,), tensors=(tensor,)
    )
    reader = CheckpointReader(Checkpoint(Path("nowhere"), manifest), OneFile(content))
    assert bytes(reader.tensor("c", "t")) == values.tobytes()
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    part = tuple(slice(a, data.draw(st.integers(a, size))) for a, size in zip(start, shape))
    assert LazyTensor(reader, tensor)[part].numpy().tobytes() == values[part].tobytes()


def saved(directory, num_writers: int) -> CheckpointReader:
    """The same state from any number of writers."""
    values = np.arange(48, dtype=np.float32).reshape(12, 4)
    names = [f"rank_{rank}" for rank in range(num_writers)]
    store = CheckpointStore(directory)
    with store.begin(1, rank_names=names) as transaction:
        reports = []
        first = 0
        for rank, rows in enumerate(np.array_split(values, num_writers)):
            participant = RankWriter(transaction.directory, names[rank])
            part = RankTensor(
                component="optimizer",
                name="m",
                dtype="F32",
                shape=(12, 4),
                start=(first, 0),
                extent=rows.shape,
                data=rows,
            )
            step = RankTensor(component="optimizer", name="step", dtype="F32", shape=(), data=np.float32(9))
            parts = [part, step] if rank == 0 else [part]
            write_tensors(participant, f"optimizer/optim_state_rank_{rank}.safetensors", parts)
            reports.append(participant.report())
            first += len(rows)
        return CheckpointReader(transaction.commit(reports))


def test_the_digest_is_equal_for_every_number_of_writers(tmp_path):
    digests = {saved(tmp_path / str(number), number).digest() for number in (1, 2, 3, 5, 12)}
    assert len(digests) == 1


@pytest.mark.parametrize("num_readers", [1, 3, 4])
def test_a_checkpoint_of_two_writers_is_read_by_any_number(num_readers, tmp_path):
    reader = saved(tmp_path, 2)
    (tensor,) = [tensor for tensor in reader.tensors("optimizer") if tensor.name == "m"]
    rows = 12 // num_readers
    lazy = LazyTensor(reader, tensor)
    parts = [lazy[rank * rows : (rank + 1) * rows, 0:4] for rank in range(num_readers)]
    assert torch.cat(parts).numpy().tobytes() == np.arange(48, dtype=np.float32).tobytes()


def test_a_whole_tensor_is_a_view_of_the_file(tmp_path):
    reader = saved(tmp_path, 1)
    assert reader.tensor("optimizer", "m").obj is reader.tensor("optimizer", "step").obj
    assert reader.tensor("optimizer", "m").readonly


def test_what_is_not_there_is_said(tmp_path):
    reader = saved(tmp_path, 1)
    for ask in (lambda: reader.read("gone"), lambda: reader.tensor("actor", "m")):
        with pytest.raises(CheckpointNotFound, match=r"has no (file gone|tensor actor/m)"):
            ask()
    assert [entry.path for entry in reader.files("optimizer")] == ["optimizer/optim_state_rank_0.safetensors"]
