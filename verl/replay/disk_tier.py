"""The disk tier: shards as Arrow IPC files, written once, durable and complete under their names, never changed.

record batches ──> one file ──> temporary name, hashed, synced ──> renamed to rows_FIRST_DIGEST.arrow

Files are read by memory maps, whose pages can be released at any time. `DiskTier` lists all shards by their rows,
whether local or in the remote tier.
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
    """Description of a shard file.

    Attributes:
        first_row: number of its first row, from 0 at the start of the buffer.
        num_rows: number of rows.
        size: in bytes.
        leaves: digests of its pieces, as in a checkpoint's manifest.
    """

    first_row: ByteCount
    num_rows: ByteCount
    size: ByteCount
    leaves: tuple[Leaf, ...]

    @property
    def name(self) -> str:
        """File name, by first row and digest."""
        return f"rows_{self.first_row:012d}_{file_digest(self.leaves)[:16]}{SUFFIX}"

    @property
    def end(self) -> int:
        """Number of its last row plus 1."""
        return self.first_row + self.num_rows

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "leaves": [list(leaf) for leaf in self.leaves]}


def file_of(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """Serialise record batches of one schema as an Arrow file; small batches are joined."""
    joined = list(_joined(batches, sum(batch.nbytes for batch in batches) // _BATCHES))
    counted = pa.MockOutputStream()  # size in advance: a growing buffer would be copied
    _write_batches(counted, joined)
    data = pa.allocate_buffer(counted.size())
    _write_batches(pa.FixedSizeBufferWriter(data), joined)
    return data


def _write_batches(sink: Any, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def described(data: Any, first_row: int, num_rows: int) -> ReplayShard:
    """Describe the shard with this content."""
    return ReplayShard(
        first_row=first_row, num_rows=num_rows, size=memoryview(data).nbytes, leaves=hash_buffers([data])
    )


def write_shard(disk: FileSystem, directory: Path, data: Any, first_row: int, num_rows: int) -> ReplayShard:
    """Write a shard durably; it appears complete, by a rename.

    Raises:
        OSError: the write failed; there is no file of the shard's name.
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
    """Write a small file durably, including its directory entry."""
    write_by_rename(disk, path, data)
    disk.sync_directory(path.parent)


def index_name(shard: ReplayShard) -> str:
    """Name of the local index file of a shard in the store."""
    return shard.name.removesuffix(SUFFIX) + INDEX_SUFFIX


def check_file(disk: FileSystem, path: Path, shard: ReplayShard) -> None:
    """Compare a file with the size and digests of its shard.

    Raises:
        ReplayCorrupt: they differ.
    """
    size = disk.status(path).st_size
    leaves = hash_buffers([disk.map(path)]) if size else ()
    if size != shard.size or leaves != shard.leaves:
        raise ReplayCorrupt(
            f"{path} differs from the shard that was written: {size} of {shard.size} bytes, or other content"
        )


class MappedShard:
    """A memory-mapped shard.

    Attributes:
        segments: its record batches.
        starts: int64, first row of each segment within the shard.
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
        """Read the index columns, which the buffer keeps in memory for every row."""
        found = index_of(self._batches)
        self.release()
        return found

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[SegmentRows]:
        """Yield rows by number within the shard, with their positions `places` in a batch."""
        number = np.searchsorted(self.starts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            is_here = number == at
            yield SegmentRows(self.segments[at], rows[is_here] - self.starts[at], places[is_here], self)

    def release(self) -> None:
        """Release the mapped pages; they are read again on the next access."""
        self._map.madvise(mmap.MADV_DONTNEED)


def index_of(batches: Sequence[pa.RecordBatch]) -> dict[str, np.ndarray]:
    """The index columns of record batches."""
    return {name: np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in INDEX}


def index_file(index: dict[str, np.ndarray]) -> pa.Buffer:
    """Serialise index columns as an Arrow file, kept locally for a shard in the store."""
    batch = pa.record_batch({name: index[name] for name in INDEX})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def read_index(data: Any) -> dict[str, np.ndarray]:
    """Inverse of `index_file`."""
    file = pa.ipc.open_file(pa.py_buffer(data))
    return index_of([file.get_batch(number) for number in range(file.num_record_batches)])


def _joined(batches: Sequence[pa.RecordBatch], num_bytes: int) -> Iterator[pa.RecordBatch]:
    """Join record batches so that all but the last have at least `num_bytes`."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.nbytes for one in waiting) >= num_bytes:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)


_log = logging.getLogger(__name__)
FAULT_BYTES = 2**16  # bytes that the kernel reads ahead around a page fault


@dataclass(order=True)
class ShardLocation:
    """A shard and its location.

    Attributes:
        path: local file; None if it is only in the store.
        is_stored: whether the store has confirmed its upload.
    """

    first_row: int
    shard: ReplayShard = field(compare=False)
    path: Path | None = field(compare=False)
    is_stored: bool = field(compare=False, default=False)
    mapped: MappedShard | None = field(compare=False, default=None)


class DiskTier:
    """The shards of a buffer, in order of their rows.

    Args:
        disk: the file system.
        touched_bytes: limit of mapped pages in this process's memory; beyond it they are released.
    """

    def __init__(self, disk: FileSystem, touched_bytes: int):
        self._disk, self._most_touched = disk, touched_bytes
        self.placed: list[ShardLocation] = []
        self._touched: dict[int, tuple[MappedShard, int]] = {}
        self.to_delete: list[Path] = []  # unused files; a save in progress may still need them

    def __iter__(self) -> Iterator[ShardLocation]:
        return iter(self.placed)

    def add(self, shard: ReplayShard, path: Path | None, is_stored: bool = False) -> None:
        """Add a shard that has been written durably."""
        insort(self.placed, ShardLocation(shard.first_row, shard, path, is_stored))

    def holding(self, rows: np.ndarray) -> Iterator[tuple[ShardLocation, np.ndarray]]:
        """Yield each shard with some of these rows, with a mask of them."""
        firsts = np.array([placed.first_row for placed in self.placed], dtype=np.int64)
        number = np.searchsorted(firsts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            yield self.placed[at], number == at

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[SegmentRows]:
        """Yield rows by number, all in local files, with their positions `places` in a batch.

        Raises:
            ReplayCorrupt: a file differs from what was written.
        """
        for placed, is_here in self.holding(rows):
            yield from self.opened(placed).find(rows[is_here] - placed.first_row, places[is_here])

    def opened(self, placed: ShardLocation) -> MappedShard:
        """Map a local shard."""
        assert placed.path is not None
        if placed.mapped is None:
            placed.mapped = MappedShard(self._disk, placed.path, placed.shard)
        return placed.mapped

    def touched(self, part: SegmentRows) -> None:
        """Count the pages that were read for a part; above the limit release all (they stay in the page cache)."""
        shard: MappedShard | None = part.file
        if shard is None:
            return
        places = 2 * len(part.segment.fields) + 4  # values and offsets of each, and the other columns
        read = len(part.rows) * places * FAULT_BYTES
        _, before = self._touched.get(id(shard), (shard, 0))
        self._touched[id(shard)] = shard, min(shard.shard.size, before + read)
        if sum(size for _, size in self._touched.values()) > self._most_touched:
            self.release()

    def release(self) -> None:
        """Release the pages of all files."""
        for shard, _ in self._touched.values():
            shard.release()
        self._touched.clear()

    def drop_before(self, row: int) -> list[ReplayShard]:
        """Remove the shards that end before a row; returns those that are in the store."""
        gone = [placed for placed in self.placed if placed.shard.end <= row]
        self.placed = self.placed[len(gone) :]
        for placed in gone:
            self.leave(placed)
        return [placed.shard for placed in gone if placed.is_stored]

    def leave(self, placed: ShardLocation) -> None:
        """Drop the local file of a shard; the next `sweep` deletes it."""
        if placed.path is not None:
            self.to_delete.append(placed.path)
        if placed.mapped is not None:
            self._touched.pop(id(placed.mapped), None)
        placed.path = placed.mapped = None

    def sweep(self) -> None:
        """Delete the dropped files."""
        for path in self.to_delete:
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._disk.unlink(path)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    _log.warning("%s could not be removed: %s", path, error)
        self.to_delete = []
