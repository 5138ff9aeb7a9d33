"""Shards: consecutive rows that share one Arrow file, wherever they are.

open ── full ──> being written ──> local file, mapped ── old ──> file and object in the store ──> object alone

A file is hashed, synced and complete before it gets its name, rows_FIRST_DIGEST.arrow, and never changes. It is read
through a memory map, whose pages can be released at any time.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
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
_BATCH_BYTES = 2**20  # smaller record batches are joined: each costs a reader some objects in memory


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """Description of a shard's file.

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

    @property
    def index_name(self) -> str:
        """Name of the local file of index columns that stands for a shard in the store."""
        return self.name.removesuffix(SUFFIX) + INDEX_SUFFIX


class Shard:
    """Consecutive rows with one file, which is written when they are enough.

    Args:
        first_row: number of the first row.
        file: description of the file, if there is one.
        path: local file; None before it is written, or if it is only in the store.
        is_stored: the store has the file, and `index_name` stands beside the local files.
    Attributes:
        num_bytes: memory of rows that are not in a file yet.
        writing: the write in the background, once it has started.
        upload, fetch: requests to the store, once they have started.
    """

    def __init__(
        self, first_row: int, file: ShardFile | None = None, path: Path | None = None, is_stored: bool = False
    ):
        self.first_row, self.file, self.path, self.is_stored = first_row, file, path, is_stored
        self.num_rows, self.num_bytes = 0 if file is None else file.num_rows, 0
        self.writing: Future[ShardFile] | None = None
        self.upload: Future[int] | None = None
        self.fetch: Future[Path] | None = None
        self._batches: list[pa.RecordBatch] = []
        self._segments: list[tuple[int, RowSegment]] = []  # with their first rows
        self._map: Any = None

    @property
    def end(self) -> int:
        """Number of the last row plus 1."""
        return self.first_row + self.num_rows

    @property
    def is_remote(self) -> bool:
        """Whether its rows are only in the store."""
        return self.file is not None and self.path is None

    def accepts(self, schema: pa.Schema) -> bool:
        """Whether rows of this schema can be added."""
        is_open = self.writing is None and self.file is None
        return is_open and self._batches[0].schema.equals(schema, check_metadata=True)

    def append(self, batch: pa.RecordBatch, segment: RowSegment) -> None:
        """Add rows in memory."""
        self._batches.append(batch)
        self._segments.append((self.end, segment))
        self.num_rows += segment.num_rows
        self.num_bytes += segment.num_bytes

    def content(self) -> pa.Buffer:
        """The rows in memory as an Arrow file."""
        batches = list(_joined(self._batches))
        counted = pa.MockOutputStream()  # size in advance: a growing buffer would be copied
        _write_batches(counted, batches)
        data = pa.allocate_buffer(counted.size())
        _write_batches(pa.FixedSizeBufferWriter(data), batches)
        return data

    def describe(self, data: Any) -> ShardFile:
        """The file with this content."""
        return self._file(memoryview(data).nbytes, hash_buffers([data]))

    def write(self, disk: FileSystem, directory: Path) -> ShardFile:
        """Write the rows durably; the file appears complete, by a rename.

        Raises:
            OSError: the write failed; there is no file of the shard's name.
        """
        data, unfinished = self.content(), directory / f"rows_{self.first_row:012d}{UNFINISHED}"
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(unfinished)
        try:
            file = self._file(memoryview(data).nbytes, write_file(disk, unfinished, [data]))
            disk.rename(unfinished, directory / file.name)
            disk.sync_directory(directory)
        except OSError:
            with contextlib.suppress(OSError):
                disk.unlink(unfinished)
            raise
        return file

    def write_error(self) -> OSError | None:
        """Wait for the write; the error that the disk failed it with, if any."""
        assert self.writing is not None
        error = self.writing.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        return error

    def moved_to(self, file: ShardFile, path: Path | None) -> None:
        """Read rows from another place from now on: a file was written, fetched, or removed."""
        self.file, self.path, self.num_bytes = file, path, 0
        self._batches, self._segments, self._map = [], [], None

    def segments(self, disk: FileSystem) -> list[tuple[int, RowSegment]]:
        """First row and rows of each record batch; a file is mapped when it is first read.

        Raises:
            ReplayCorrupt: the file differs from what was written.
        """
        if not self._segments:
            assert self.file is not None
            assert self.path is not None
            self._batches, self._map = _map_file(disk, self.path, self.file)
            firsts = np.cumsum([self.first_row, *(batch.num_rows for batch in self._batches)]).tolist()
            self._segments = [(first, RowSegment.of(batch)) for first, batch in zip(firsts, self._batches)]
            self.release()
        return self._segments

    def batches(self, disk: FileSystem) -> list[pa.RecordBatch]:
        """The record batches of `segments`."""
        self.segments(disk)
        return self._batches

    def index(self, disk: FileSystem) -> dict[str, np.ndarray]:
        """The index columns, which the buffer keeps in memory for every row."""
        columns = _index_of(self.batches(disk))
        self.release()
        return columns

    def release(self) -> None:
        """Release the mapped pages; they are read again on the next access."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _file(self, size: int, leaves: tuple[Leaf, ...]) -> ShardFile:
        return ShardFile(first_row=self.first_row, num_rows=self.num_rows, size=size, leaves=leaves)


def by_number(firsts: Sequence[int], rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Group rows by the range that they are in.

    Args:
        firsts: first row of each range, ascending.
        rows: row numbers.
    Returns:
        Position of each range that has some of the rows, and a mask of them.
    """
    number = np.searchsorted(np.array(firsts, dtype=np.int64), rows, side="right") - 1
    for at in np.unique(number).tolist():
        yield at, number == at


def find_rows(
    segments: Sequence[tuple[int, RowSegment]], rows: np.ndarray, positions: np.ndarray, shard: Shard | None = None
) -> Iterator[SegmentRows]:
    """Yield rows by segment, with their positions in a batch."""
    for at, is_here in by_number([first for first, _ in segments], rows):
        first, segment = segments[at]
        yield SegmentRows(segment, rows[is_here] - first, positions[is_here], shard)


def write_index(disk: FileSystem, path: Path, index: dict[str, np.ndarray]) -> None:
    """Write index columns durably, for a shard in the store."""
    batch = pa.record_batch({name: index[name] for name in INDEX})
    sink = pa.BufferOutputStream()
    _write_batches(sink, [batch])
    write_by_rename(disk, path, sink.getvalue())
    disk.sync_directory(path.parent)


def read_index(data: Any) -> dict[str, np.ndarray]:
    """Index columns of a file by `write_index`."""
    return _index_of(_read_batches(data))


def _index_of(batches: Sequence[pa.RecordBatch]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in INDEX}


def _map_file(disk: FileSystem, path: Path, file: ShardFile) -> tuple[list[pa.RecordBatch], Any]:
    """Record batches of a file, and the memory map that they are in."""
    try:
        memory = disk.map(path)
        if len(memory) != file.size:
            raise ReplayCorrupt(f"{path} has {len(memory)} bytes instead of {file.size}")
        batches = _read_batches(memory)
    except (OSError, pa.ArrowInvalid) as error:
        raise ReplayCorrupt(f"{path} cannot be read: {error}") from error
    if sum(batch.num_rows for batch in batches) != file.num_rows:
        raise ReplayCorrupt(f"{path} has other rows than the {file.num_rows} that were written")
    return batches, memory.obj


def _read_batches(data: Any) -> list[pa.RecordBatch]:
    file = pa.ipc.open_file(pa.py_buffer(data))
    return [file.get_batch(number) for number in range(file.num_record_batches)]


def _write_batches(sink: Any, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join record batches so that all but the last have at least `_BATCH_BYTES`."""
    waiting, num_bytes = list[pa.RecordBatch](), 0
    for batch in batches:
        waiting.append(batch)
        num_bytes += batch.nbytes
        if num_bytes >= _BATCH_BYTES:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield pa.concat_batches(waiting)
