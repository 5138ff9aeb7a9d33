"""Shards: Arrow IPC files of rows, written once, durable and whole under their names, and never changed.

record batches ──> one file ──> written aside, hashed, synced ──> renamed to rows_FIRST_DIGEST.arrow

A file is read through a map of its pages, which can be given back at any time: the kernel keeps what it has room for.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.checkpoint.core.filesystem import FileSystem, write_by_rename, write_file
from verl.checkpoint.core.hashing import Leaf, file_digest, hash_buffers
from verl.errors import ReplayCorrupt
from verl.replay.rows import INDEX, Part, Segment

SUFFIX, INDEX_SUFFIX, UNFINISHED = ".arrow", ".index.arrow", ".unfinished"
_BATCHES = 2  # record batches of a shard: each costs a reader some objects in memory, and its writer a copy


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of rows.

    Attributes:
        first_row: number of its first row in the buffer, from 0 at the buffer's beginning.
        size: bytes.
        leaves: pieces with their digests, as in a checkpoint's manifest.
    """

    first_row: int
    num_rows: int
    size: int
    leaves: tuple[Leaf, ...]

    @property
    def name(self) -> str:
        """Of its file: where it begins, and what is in it."""
        return f"rows_{self.first_row:012d}_{file_digest(self.leaves)[:16]}{SUFFIX}"

    @property
    def end(self) -> int:
        """Number of the row after its last."""
        return self.first_row + self.num_rows

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "leaves": [list(leaf) for leaf in self.leaves]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Shard:
        return cls(**{**value, "leaves": tuple(Leaf(*leaf) for leaf in value["leaves"])})


def file_of(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """Record batches of one schema as the bytes of an Arrow file, small ones joined."""
    joined = list(_joined(batches, sum(batch.nbytes for batch in batches) // _BATCHES))
    counted = pa.MockOutputStream()  # how long it will be: a buffer that grows is copied as it does
    _write_batches(counted, joined)
    data = pa.allocate_buffer(counted.size())
    _write_batches(pa.FixedSizeBufferWriter(data), joined)
    return data


def _write_batches(sink: Any, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def described(data: Any, first_row: int, num_rows: int) -> Shard:
    """The shard that these bytes are."""
    return Shard(first_row=first_row, num_rows=num_rows, size=memoryview(data).nbytes, leaves=hash_buffers([data]))


def write_shard(disk: FileSystem, directory: Path, data: Any, first_row: int, num_rows: int) -> Shard:
    """Write a shard and make it durable; before the rename there is no shard, after it there is a whole one.

    Raises:
        OSError: the file system refused; nothing is left under the shard's name.
    """
    unfinished = directory / f"rows_{first_row:012d}{UNFINISHED}"
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(unfinished)
    try:
        leaves = write_file(disk, unfinished, [data])
        shard = Shard(first_row=first_row, num_rows=num_rows, size=memoryview(data).nbytes, leaves=leaves)
        disk.rename(unfinished, directory / shard.name)
        disk.sync_directory(directory)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(unfinished)
        raise
    return shard


def write_bytes(disk: FileSystem, path: Path, data: Any) -> None:
    """Write a small file and make it durable, name and all."""
    write_by_rename(disk, path, data)
    disk.sync_directory(path.parent)


def index_name(shard: Shard) -> str:
    """The file that is kept here of a shard in the store."""
    return shard.name.removesuffix(SUFFIX) + INDEX_SUFFIX


def check_file(disk: FileSystem, path: Path, shard: Shard) -> None:
    """Read a file that comes from elsewhere, and compare it with what its shard was.

    Raises:
        ReplayCorrupt: other bytes, or too few.
    """
    size = disk.status(path).st_size
    leaves = hash_buffers([disk.map(path)]) if size else ()
    if size != shard.size or leaves != shard.leaves:
        raise ReplayCorrupt(f"{path} is not the shard that was written: {size} of {shard.size} bytes, or others")


class MappedShard:
    """A shard whose pages are brought into memory as rows are read.

    Attributes:
        segments: its record batches.
        starts: int64, the first row of each, within the shard.
    """

    def __init__(self, disk: FileSystem, path: Path, shard: Shard):
        self.shard = shard
        try:
            memory = disk.map(path)
            if len(memory) != shard.size:
                raise ReplayCorrupt(f"{path} has {len(memory)} bytes instead of {shard.size}")
            file = pa.ipc.open_file(pa.py_buffer(memory))
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        except (OSError, pa.ArrowInvalid) as error:
            raise ReplayCorrupt(f"{path} cannot be read: {error}") from error
        self._map: Any = memory.obj
        self.segments = [Segment.of(batch).with_own_ends() for batch in batches]
        self.starts = np.cumsum([0, *(batch.num_rows for batch in batches)])[:-1]
        if sum(batch.num_rows for batch in batches) != shard.num_rows:
            raise ReplayCorrupt(f"{path} has other rows than the {shard.num_rows} that were written")
        self._batches = batches
        self.release()

    def index(self) -> dict[str, np.ndarray]:
        """The columns that stay in memory for every row, read anew."""
        found = index_of(self._batches)
        self.release()
        return found

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[Part]:
        """Rows, numbered within the shard, that become `places` of a batch."""
        number = np.searchsorted(self.starts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            is_here = number == at
            yield Part(self.segments[at], rows[is_here] - self.starts[at], places[is_here], self)

    def release(self) -> None:
        """Give the pages back; they come again when they are touched."""
        self._map.madvise(mmap.MADV_DONTNEED)


def index_of(batches: Sequence[pa.RecordBatch]) -> dict[str, np.ndarray]:
    """The columns of record batches that stay in memory for every row."""
    return {name: np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in INDEX}


def index_file(index: dict[str, np.ndarray]) -> pa.Buffer:
    """Those columns alone, as an Arrow file: all that is known here of a shard that lies elsewhere."""
    batch = pa.record_batch({name: index[name] for name in INDEX})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def read_index(data: Any) -> dict[str, np.ndarray]:
    """What `index_file` holds."""
    file = pa.ipc.open_file(pa.py_buffer(data))
    return index_of([file.get_batch(number) for number in range(file.num_record_batches)])


def _joined(batches: Sequence[pa.RecordBatch], num_bytes: int) -> Iterator[pa.RecordBatch]:
    """Fewer record batches, none but the last below so many bytes."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.nbytes for one in waiting) >= num_bytes:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)
