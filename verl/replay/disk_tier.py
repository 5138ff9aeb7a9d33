"""The disk tier: shards as Arrow IPC files, written once, durable and complete under their names, never changed.

record batches ──> one file ──> written aside, hashed, synced ──> renamed to rows_FIRST_DIGEST.arrow

A file is read through a memory map, whose pages can be given back at any time. `DiskTier` lists all shards by their
rows, here on the disk or in the remote tier.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.checkpoint.core.filesystem import FileSystem, write_by_rename, write_file
from verl.checkpoint.core.hashing import Leaf, file_digest, hash_buffers
from verl.errors import ReplayCorrupt
from verl.replay.arrow_rows import INDEX, RowSegment, SegmentRows
from verl.utils.external_input import ByteCount

SUFFIX, INDEX_SUFFIX, UNFINISHED = ".arrow", ".index.arrow", ".unfinished"
_BATCHES = 2  # record batches of a shard: each costs a reader some objects in memory, and its writer a copy


@dataclass(frozen=True, kw_only=True)
class ReplayShard:
    """A file of rows.

    Attributes:
        first_row: number of its first row in the buffer, from 0 at the buffer's beginning.
        size: bytes.
        leaves: pieces with their digests, as in a checkpoint's manifest.
    """

    first_row: ByteCount
    num_rows: ByteCount
    size: ByteCount
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


def described(data: Any, first_row: int, num_rows: int) -> ReplayShard:
    """The shard that these bytes are."""
    return ReplayShard(
        first_row=first_row, num_rows=num_rows, size=memoryview(data).nbytes, leaves=hash_buffers([data])
    )


def write_shard(disk: FileSystem, directory: Path, data: Any, first_row: int, num_rows: int) -> ReplayShard:
    """Write a shard and make it durable; before the rename there is no shard, after it there is a whole one.

    Raises:
        OSError: the file system refused; nothing is left under the shard's name.
    """
    unfinished = directory / f"rows_{first_row:012d}{UNFINISHED}"
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(unfinished)
    try:
        leaves = write_file(disk, unfinished, [data])
        shard = ReplayShard(first_row=first_row, num_rows=num_rows, size=memoryview(data).nbytes, leaves=leaves)
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


def index_name(shard: ReplayShard) -> str:
    """The file that is kept here of a shard in the store."""
    return shard.name.removesuffix(SUFFIX) + INDEX_SUFFIX


def check_file(disk: FileSystem, path: Path, shard: ReplayShard) -> None:
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

    def __init__(self, disk: FileSystem, path: Path, shard: ReplayShard):
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
        self.segments = [RowSegment.of(batch).with_own_ends() for batch in batches]
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

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[SegmentRows]:
        """Rows, numbered within the shard, that become `places` of a batch."""
        number = np.searchsorted(self.starts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            is_here = number == at
            yield SegmentRows(self.segments[at], rows[is_here] - self.starts[at], places[is_here], self)

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


_log = logging.getLogger(__name__)
FAULT_BYTES = 2**16  # what the kernel brings in around a page that is touched


@dataclass(order=True)
class ShardLocation:
    """A shard, and where it lies.

    Attributes:
        path: its file here; None while it is only in the store.
        is_stored: the store has confirmed that it holds it.
    """

    first_row: int
    shard: ReplayShard = field(compare=False)
    path: Path | None = field(compare=False)
    is_stored: bool = field(compare=False, default=False)
    mapped: MappedShard | None = field(compare=False, default=None)


class DiskTier:
    """Shards in order.

    Args:
        touched_bytes: of pages of files that may be in this process's memory; beyond that they are given back.
    """

    def __init__(self, disk: FileSystem, touched_bytes: int):
        self._disk, self._most_touched = disk, touched_bytes
        self.placed: list[ShardLocation] = []
        self._touched: dict[int, tuple[MappedShard, int]] = {}
        self.to_delete: list[Path] = []  # files that nothing of the buffer needs, but perhaps a save under way

    def __iter__(self) -> Iterator[ShardLocation]:
        return iter(self.placed)

    def add(self, shard: ReplayShard, path: Path | None, is_stored: bool = False) -> None:
        """A shard that is whole and durable."""
        insort(self.placed, ShardLocation(shard.first_row, shard, path, is_stored))

    def holding(self, rows: np.ndarray) -> Iterator[tuple[ShardLocation, np.ndarray]]:
        """The shards of these rows, and which of them each has, as a mask."""
        firsts = np.array([placed.first_row for placed in self.placed], dtype=np.int64)
        number = np.searchsorted(firsts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            yield self.placed[at], number == at

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[SegmentRows]:
        """Rows that become `places` of a batch, all of them in files that are here.

        Raises:
            ReplayCorrupt: a file is not what was written.
        """
        for placed, is_here in self.holding(rows):
            yield from self.opened(placed).find(rows[is_here] - placed.first_row, places[is_here])

    def opened(self, placed: ShardLocation) -> MappedShard:
        """The rows of a shard that is here."""
        assert placed.path is not None
        if placed.mapped is None:
            placed.mapped = MappedShard(self._disk, placed.path, placed.shard)
        return placed.mapped

    def touched(self, part: SegmentRows) -> None:
        """Rows of a part were read: once too much is in memory, give it back; it stays in the kernel's cache."""
        shard: MappedShard | None = part.file
        if shard is None:
            return
        places = 2 * len(part.segment.fields) + 4  # values and offsets of each, and the columns beside
        read = len(part.rows) * places * FAULT_BYTES
        _, before = self._touched.get(id(shard), (shard, 0))
        self._touched[id(shard)] = shard, min(shard.shard.size, before + read)
        if sum(size for _, size in self._touched.values()) > self._most_touched:
            self.release()

    def release(self) -> None:
        """Give back the pages of all files."""
        for shard, _ in self._touched.values():
            shard.release()
        self._touched.clear()

    def drop_before(self, row: int) -> list[ReplayShard]:
        """Take out the shards that end before a row; gives those that the store holds."""
        gone = [placed for placed in self.placed if placed.shard.end <= row]
        self.placed = self.placed[len(gone) :]
        for placed in gone:
            self.leave(placed)
        return [placed.shard for placed in gone if placed.is_stored]

    def leave(self, placed: ShardLocation) -> None:
        """Forget the file of a shard, which is removed by the next `sweep`."""
        if placed.path is not None:
            self.to_delete.append(placed.path)
        if placed.mapped is not None:
            self._touched.pop(id(placed.mapped), None)
        placed.path = placed.mapped = None

    def sweep(self) -> None:
        """Remove the files that were left."""
        for path in self.to_delete:
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._disk.unlink(path)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    _log.warning("%s could not be removed: %s", path, error)
        self.to_delete = []
