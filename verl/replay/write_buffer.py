"""The memory tier, and the write buffer of rows until a thread has written them as a shard.

add ──> open ── full ──> closed: being written ──> collect: a shard, and the rows leave memory
                             └── the write fails: logged, rows stay in memory, retried
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from verl.checkpoint.core.filesystem import FileSystem
from verl.replay.arrow_rows import RowSegment, SegmentRows
from verl.replay.disk_tier import ReplayShard, described, file_of, write_shard


class MemoryTier:
    """Consecutive segments of rows in memory.

    Attributes:
        num_bytes: size of all segments.
    """

    def __init__(self) -> None:
        self._segments: deque[tuple[int, RowSegment]] = deque()
        self.num_bytes = 0

    @property
    def first(self) -> int | None:
        """Number of the oldest row; None if there are no rows."""
        return self._segments[0][0] if self._segments else None

    @property
    def end(self) -> int:
        """Number of the newest row plus 1; 0 if there are no rows."""
        return self._segments[-1][0] + self._segments[-1][1].num_rows if self._segments else 0

    def append(self, first_row: int, segment: RowSegment) -> None:
        """Newer rows."""
        assert not self._segments or first_row == self.end
        self._segments.append((first_row, segment))
        self.num_bytes += segment.num_bytes

    def prepend(self, first_row: int, segment: RowSegment) -> None:
        """Older rows."""
        assert not self._segments or first_row + segment.num_rows == self.first
        self._segments.appendleft((first_row, segment))
        self.num_bytes += segment.num_bytes

    def drop_before(self, row: int) -> None:
        """Drop the segments that end before this row."""
        while self._segments and self._segments[0][0] + self._segments[0][1].num_rows <= row:
            self.num_bytes -= self._segments.popleft()[1].num_bytes

    def trim(self, num_bytes: int) -> None:
        """Drop the oldest segments until at most `num_bytes` are left."""
        while self._segments and self.num_bytes > num_bytes:
            self.num_bytes -= self._segments.popleft()[1].num_bytes

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[SegmentRows]:
        """Yield the rows that are in memory, with their positions `places` in a batch."""
        firsts = np.array([first for first, _ in self._segments])
        number = np.searchsorted(firsts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            is_here = number == at
            yield SegmentRows(self._segments[at][1], rows[is_here] - firsts[at], places[is_here])


_log = logging.getLogger(__name__)


@dataclass
class _ClosedShard:
    """Rows that are being written as a shard."""

    first_row: int
    batches: list[pa.RecordBatch]
    writing: Future[ReplayShard] = field(default_factory=Future)

    @property
    def end(self) -> int:
        return self.first_row + sum(batch.num_rows for batch in self.batches)


class WriteBuffer:
    """Rows that are not yet in a shard.

    Args:
        disk: the file system.
        directory: of the shards.
        shard_bytes: size of a shard.
        limit_bytes: limit of rows in memory; above it `add` waits for the disk.
    """

    def __init__(self, disk: FileSystem, directory: Path, shard_bytes: int, limit_bytes: int):
        self._disk, self._directory = disk, directory
        self._shard_bytes, self._limit_bytes = shard_bytes, limit_bytes
        self._open: list[pa.RecordBatch] = []
        self._open_first = self._open_bytes = 0
        self._closed: list[_ClosedShard] = []
        self._rows = MemoryTier()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="replay_shards")
        self._is_reported = False

    @property
    def num_bytes(self) -> int:
        """Size of the rows in memory."""
        return self._rows.num_bytes

    @property
    def first(self) -> int | None:
        """Number of the oldest row that is not in a shard."""
        return self._rows.first

    def add(self, first_row: int, batch: pa.RecordBatch) -> tuple[int, int] | None:
        """Add rows.

        Returns:
            A range of older rows that were dropped, since writes fail and memory is full; or None.
        """
        if self._open and not self._open[0].schema.equals(batch.schema, check_metadata=True):
            self._close_open()
        if not self._open:
            self._open_first = first_row
        self._open.append(batch)
        self._open_bytes += batch.nbytes
        self._rows.append(first_row, RowSegment.of(batch))
        if self._open_bytes >= self._shard_bytes:
            self._close_open()
        return self._give_up() if self.num_bytes > self._limit_bytes else None

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[SegmentRows]:
        """See `MemoryTier.find`."""
        return self._rows.find(rows, places)

    def collect(self) -> list[ReplayShard]:
        """The shards written since the last call; failed writes are retried."""
        done: list[ReplayShard] = []
        while self._closed and self._closed[0].writing.done():  # in order: rows must not leave memory before older ones
            error = self._closed[0].writing.exception()
            if error is not None:
                if not isinstance(error, OSError):
                    raise error
                self._tell(error)
                self._start(self._closed[0])
                break
            closed = self._closed.pop(0)
            done.append(closed.writing.result())
            self._rows.drop_before(closed.end)
            self._is_reported = False
        return done

    def seal(self) -> tuple[list[ReplayShard], list[tuple[ReplayShard, pa.Buffer]]]:
        """Write all rows as shards, and wait.

        Returns:
            The shards written, and shards whose writes failed with their content.
        """
        self._close_open()
        for closed in self._closed:
            if closed.writing.done() and closed.writing.exception() is not None:
                self._start(closed)  # a retry: the disk may have room now
            _wait(closed)
        done = self.collect()
        files = [(closed, file_of(closed.batches)) for closed in self._closed]
        return done, [(described(data, c.first_row, c.end - c.first_row), data) for c, data in files]

    def close(self) -> None:
        """Stop the thread after its current write."""
        self._writer.shutdown(wait=True)

    def _close_open(self) -> None:
        if self._open:
            closed = _ClosedShard(self._open_first, self._open)
            self._open, self._open_bytes = [], 0
            self._closed.append(closed)
            self._start(closed)

    def _start(self, closed: _ClosedShard) -> None:
        closed.writing = self._writer.submit(self._write, closed)

    def _write(self, closed: _ClosedShard) -> ReplayShard:
        rows = closed.end - closed.first_row
        return write_shard(self._disk, self._directory, file_of(closed.batches), closed.first_row, rows)

    def _give_up(self) -> tuple[int, int] | None:
        """Wait for the disk; if the write fails, drop the oldest rows and return their range."""
        if not self._closed:
            return None
        oldest = self._closed[0]
        _wait(oldest)
        if not isinstance(oldest.writing.exception(), OSError):
            return None
        self._tell(oldest.writing.exception())
        self._closed.pop(0)
        self._rows.drop_before(oldest.end)
        return oldest.first_row, oldest.end

    def _tell(self, error: BaseException | None) -> None:
        if not self._is_reported:
            _log.warning("Replay rows cannot be written and stay in memory; the write is retried: %s", error)
        self._is_reported = True


def _wait(closed: _ClosedShard) -> None:
    closed.writing.exception()
