"""Shards, the index over them, and their list in a checkpoint. A shard is consecutive rows that share one Arrow file,
wherever they are.

open ── full ──> being written ──> local file, mapped ── old ──> file and object in the store ──> object alone

A file is hashed, synced and complete before it gets its name, rows_FIRST_DIGEST.arrow, and never changes. It is read
through a memory map, whose pages are released after each read. In a checkpoint:

    replay_buffer/buffer.json                counters, and every shard: rows, bytes, digests, whether the store has it
    replay_buffer/rows_FIRST_DIGEST.arrow    a local shard, a hard link
    replay_buffer/rows_..._.index.arrow      index columns of a shard in the store

The number of processes and the rows in device memory are not saved; they are determined when the buffer is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from verl.checkpoint.core.filesystem import FileSystem, write_by_rename, write_file
from verl.checkpoint.core.hashing import Leaf, file_digest
from verl.errors import ReplayCorrupt, ReplayError
from verl.replay.arrow_rows import INDEX, SelectedRows
from verl.utils.external_input import ByteCount, ExternalInputError, parse_as

SUFFIX, INDEX_SUFFIX, UNFINISHED = ".arrow", ".index.arrow", ".unfinished"
_BATCH_BYTES = 2**20  # smaller record batches are joined, because each has a header in the file


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """Description of a shard's file.

    Attributes:
        first_row: number of its first row, from 0 at the start of the buffer.
        num_rows: number of rows.
        size: in bytes.
        leaves: digests of its pieces, as in a checkpoint's manifest.
        place: `cold` if the store has it, and only its index is local.
    """

    first_row: ByteCount
    num_rows: ByteCount
    size: ByteCount
    leaves: tuple[Leaf, ...]
    place: Literal["here", "cold"] = "here"

    @property
    def name(self) -> str:
        """File name, by first row and digest."""
        return f"rows_{self.first_row:012d}_{file_digest(self.leaves)[:16]}{SUFFIX}"

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
    Attributes:
        num_bytes: memory of rows that are not in a file yet.
        writing: the write in the background, once it has started.
        upload, fetch: requests to the store, once they have started.
    """

    def __init__(self, first_row: int, file: ShardFile | None = None, path: Path | None = None):
        self.first_row, self.file, self.path = first_row, file, path
        self.num_rows, self.num_bytes = 0 if file is None else file.num_rows, 0
        self.writing: Future[ShardFile] | None = None
        self.upload: Future[int] | None = None
        self.fetch: Future[Path] | None = None
        self._records: list[pa.RecordBatch] = []  # in memory, or mapped
        self._map: Any = None

    @property
    def end(self) -> int:
        """Number of the last row plus 1."""
        return self.first_row + self.num_rows

    @property
    def is_stored(self) -> bool:
        """Whether the store has its file, and the file of its index is next to the local files."""
        return self.file is not None and self.file.place == "cold"

    @property
    def is_remote(self) -> bool:
        """Whether its rows are only in the store."""
        return self.file is not None and self.path is None

    def accepts(self, schema: pa.Schema) -> bool:
        """Whether rows of this schema can be added."""
        is_open = self.writing is None and self.file is None
        return is_open and self._records[0].schema.equals(schema, check_metadata=True)

    def append(self, record: pa.RecordBatch) -> None:
        """Add rows in memory."""
        self.num_rows += record.num_rows
        self.num_bytes += record.nbytes
        if self._records and self._records[-1].nbytes < _BATCH_BYTES:
            record = pa.concat_batches([self._records.pop(), record])
        self._records.append(record)

    def write(self, disk: FileSystem, directory: Path) -> ShardFile:
        """Write the rows durably; the file appears complete, by a rename.

        Raises:
            OSError: the write failed; there is no file of the shard's name.
        """
        unfinished = directory / f"rows_{self.first_row:012d}{UNFINISHED}"
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(unfinished)
        try:
            leaves = write_file(disk, unfinished, [_arrow_file(self._records)])
            size = sum(leaf.size for leaf in leaves)
            file = ShardFile(first_row=self.first_row, num_rows=self.num_rows, size=size, leaves=leaves)
            disk.rename(unfinished, directory / file.name)
            disk.sync_directory(directory)
        except OSError:
            with contextlib.suppress(OSError):
                disk.unlink(unfinished)
            raise
        return file

    def written(self) -> ShardFile:
        """Wait for the write.

        Raises:
            ReplayError: the disk refused it.
        """
        assert self.writing is not None
        try:
            return self.writing.result()
        except OSError as error:
            raise ReplayError(
                f"replay.directory: rows cannot be written there ({error}). Make room or set another one, and continue "
                "by resume=latest."
            ) from error

    def moved_to(self, file: ShardFile, path: Path | None) -> None:
        """Read rows from another place from now on: a file was written, fetched, or removed."""
        self.file, self.path, self.num_bytes = file, path, 0
        self._records, self._map = [], None

    def select(self, disk: FileSystem, rows: np.ndarray) -> Iterator[SelectedRows]:
        """Yield rows by number, ascending.

        Raises:
            ReplayCorrupt: the file differs from what was written.
        """
        records = self._opened(disk)
        firsts = np.cumsum([self.first_row, *(record.num_rows for record in records)])
        for at, part in split_rows(rows, firsts[:-1]):
            yield SelectedRows(records[at], part - firsts[at], self._release)

    def index(self, disk: FileSystem) -> dict[str, np.ndarray]:
        """The index columns, which the buffer keeps in memory for every row."""
        columns = _index_of(self._opened(disk))
        self._release()
        return columns

    def _opened(self, disk: FileSystem) -> list[pa.RecordBatch]:
        """The record batches; a file is mapped when it is first read."""
        if not self._records:
            assert self.file is not None
            assert self.path is not None
            self._records, self._map = _map_file(disk, self.path, self.file)
        return self._records

    def _release(self) -> None:
        """Release the mapped pages; the next read finds them in the page cache, or reads them again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


_DTYPES = {
    "group": np.int64, "step": np.int32, "policy_version": np.int32, "score": np.float32, "advantage": np.float32,
    "is_there": np.bool_,
}  # fmt: skip


class RowIndex:
    """All rows of a buffer, by number; 25 bytes per row. Row numbers never change.

    Attributes:
        first, end: number of the oldest row, and of the next row to be appended.
        shards: where the rows are, in order of their numbers.
    """

    def __init__(self) -> None:
        self.first = self.end = 0
        self.shards: list[Shard] = []
        self._columns = {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()}  # longer than the rows

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of all rows, read-only."""
        return self._columns[name][: len(self)]

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        """Append rows, [n] in each column."""
        self._extend(len(columns["group"]), {**columns, "is_there": True})

    def skip_to(self, row: int) -> None:
        """Append lost rows, which keep their numbers, up to this number; rows of an empty index begin there."""
        if not len(self):
            self.first = self.end = row
        self._extend(row - self.end, dict.fromkeys(_DTYPES, 0))

    def lose(self, first: int, end: int) -> int:
        """Mark rows as lost; returns how many of them were not lost before."""
        there = self["is_there"][self.span(first, end)]
        count = int(there.sum())
        there[:] = False
        return count

    def drop_before(self, row: int) -> list[Shard]:
        """Remove the rows before this number; returns the shards without other rows, once their files are written."""
        row = max(row, self.first)
        self._columns = {name: column[row - self.first :] for name, column in self._columns.items()}
        self.first, self.end = row, max(self.end, row)
        dropped = [shard for shard in self.shards if shard.end <= row and shard.file is not None]
        self.shards = [shard for shard in self.shards if shard not in dropped]
        return dropped

    def span(self, first: int, end: int) -> slice:
        """The slice of a range of row numbers in the columns."""
        return slice(max(0, first - self.first), max(0, min(end, self.end) - self.first))

    def holding(self, rows: np.ndarray) -> Iterator[tuple[Shard, np.ndarray]]:
        """Yield each shard with some of these ascending rows, and those rows."""
        for at, part in split_rows(rows, [shard.first_row for shard in self.shards]):
            yield self.shards[at], part

    def _extend(self, count: int, columns: Mapping[str, np.ndarray | float]) -> None:
        size = len(self)
        if size + count > len(self._columns["group"]):
            more = {name: np.zeros(size + 2 * count, dtype) for name, dtype in _DTYPES.items()}
            self._columns = {name: np.concatenate([self[name], more[name]]) for name in _DTYPES}
        for name, values in columns.items():
            self._columns[name][size : size + count] = values
        self.end += count


def split_rows(rows: np.ndarray, firsts: Sequence[int] | np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Split ascending row numbers by the ranges that they are in.

    Args:
        firsts: first row of each range, ascending.
    Returns:
        Position of each range that has some of the rows, and those rows.
    """
    parts = np.split(rows, np.searchsorted(rows, firsts[1:]))
    return ((at, part) for at, part in enumerate(parts) if len(part))


def write_index(disk: FileSystem, path: Path, index: dict[str, np.ndarray]) -> None:
    """Write index columns durably, for a shard in the store."""
    record = pa.record_batch({name: index[name] for name in INDEX})
    write_by_rename(disk, path, _arrow_file([record]).to_pybytes())
    disk.sync_directory(path.parent)


def read_index(data: Any) -> dict[str, np.ndarray]:
    """Index columns of a file by `write_index`."""
    return _index_of(_read_records(data))


def _index_of(records: Sequence[pa.RecordBatch]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([record.column(name).to_numpy() for record in records]) for name in INDEX}


def _map_file(disk: FileSystem, path: Path, file: ShardFile) -> tuple[list[pa.RecordBatch], Any]:
    """Record batches of a file, and the memory map that they are in."""
    try:
        memory = disk.map(path)
        if len(memory) != file.size:
            raise ReplayCorrupt(f"{path} has {len(memory)} bytes instead of {file.size}")
        records = _read_records(memory)
    except (OSError, pa.ArrowInvalid) as error:
        raise ReplayCorrupt(f"{path} cannot be read: {error}") from error
    if sum(record.num_rows for record in records) != file.num_rows:
        raise ReplayCorrupt(f"{path} has other rows than the {file.num_rows} that were written")
    return records, memory.obj


def _read_records(data: Any) -> list[pa.RecordBatch]:
    file = pa.ipc.open_file(pa.py_buffer(data))
    return [file.get_batch(number) for number in range(file.num_record_batches)]


def _arrow_file(records: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """The bytes of an Arrow file of these record batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, records[0].schema) as writer:
        for record in records:
            writer.write_batch(record)
    return sink.getvalue()


FILE, VERSION = "buffer.json", 1


@dataclass(frozen=True, kw_only=True)
class SavedBuffer:
    """Content of `buffer.json`.

    Attributes:
        first, end: range of row numbers, end excluded.
        lost: ranges of lost rows, ends excluded.
    """

    version: ByteCount
    first: ByteCount
    end: ByteCount
    num_groups: ByteCount
    num_steps: ByteCount
    num_lost: ByteCount
    lost: tuple[tuple[ByteCount, ByteCount], ...]
    shards: tuple[ShardFile, ...]

    def as_json(self) -> bytes:
        """The content of the file."""
        return (json.dumps(dataclasses.asdict(self)) + "\n").encode()


def read_saved(file: Path) -> SavedBuffer:
    """Read a `buffer.json`.

    Raises:
        ReplayCorrupt: it does not describe a buffer, or is of a newer version.
    """
    try:
        saved = parse_as(SavedBuffer, file.read_bytes())
    except ExternalInputError as error:
        raise ReplayCorrupt(f"{file} does not describe a replay buffer ({error})") from error
    if saved.version > VERSION:
        raise ReplayCorrupt(f"{file} is of version {saved.version}: this verl reads up to {VERSION}")
    if any(first > end for first, end in saved.lost):
        raise ReplayCorrupt(f"{file} lists lost rows that end before they begin")
    return saved
