"""A tensor reads the same whatever slices it was written in, and whatever part of it is asked for."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from checkpoint.rank_tensors import RankTensor, write_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import hash_buffers
from verl.checkpoint.core.manifest import FileEntry, LogicalTensor, Manifest, SavedSlice
from verl.checkpoint.read.lazy_tensors import LazyTensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.errors import CheckpointNotFound

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)


def saved(directory, step=1, values=VALUES, num_writers=1, dtype="F32", files=None, state=None) -> Checkpoint:
    """A tensor `actor/weight`, cut by rows among writers, and some files."""
    store = CheckpointStore(directory)
    with store.begin(step) as transaction:
        first = 0
        for rank, rows in enumerate(np.array_split(values, num_writers)):
            part = RankTensor(
                component="actor", name="weight", dtype=dtype, shape=values.shape, start=(first, 0),
                extent=rows.shape, data=np.ascontiguousarray(rows),
            )  # fmt: skip
            write_tensors(transaction.main, f"actor/part_{rank}.safetensors", [part])
            first += len(rows)
        for path, content in (files or {}).items():
            transaction.main.write(path, [content])
        return transaction.commit(state=state or {})


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


def test_the_digest_is_equal_for_every_number_of_writers(tmp_path):
    readers = [CheckpointReader(saved(tmp_path / str(count), num_writers=count)) for count in (1, 2, 4)]
    assert len({reader.digest() for reader in readers}) == 1


def test_what_is_not_there_is_said(tmp_path):
    reader = CheckpointReader(saved(tmp_path))
    for ask in (lambda: reader.read("gone"), lambda: reader.tensor("actor", "m")):
        with pytest.raises(CheckpointNotFound, match=r"has no (file gone|tensor actor/m)"):
            ask()
    assert [entry.path for entry in reader.files("actor")] == ["actor/part_0.safetensors"]
