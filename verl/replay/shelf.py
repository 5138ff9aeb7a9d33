"""All shards of a buffer, by the rows they hold: here as files that are mapped when rows are read, or in the store."""

from __future__ import annotations

import contextlib
import logging
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl.checkpoint.core.filesystem import FileSystem
from verl.replay.rows import Part
from verl.replay.shards import MappedShard, Shard

_log = logging.getLogger(__name__)
FAULT_BYTES = 2**16  # what the kernel brings in around a page that is touched


@dataclass(order=True)
class Placed:
    """A shard, and where it lies.

    Attributes:
        path: its file here; None while it is only in the store.
        is_stored: the store has confirmed that it holds it.
    """

    first_row: int
    shard: Shard = field(compare=False)
    path: Path | None = field(compare=False)
    is_stored: bool = field(compare=False, default=False)
    mapped: MappedShard | None = field(compare=False, default=None)


class Shelf:
    """Shards in order.

    Args:
        touched_bytes: of pages of files that may be in this process's memory; beyond that they are given back.
    """

    def __init__(self, disk: FileSystem, touched_bytes: int):
        self._disk, self._most_touched = disk, touched_bytes
        self.placed: list[Placed] = []
        self._touched: dict[int, tuple[MappedShard, int]] = {}
        self.doomed: list[Path] = []  # files that nothing of the buffer needs, but perhaps a save under way

    def __iter__(self) -> Iterator[Placed]:
        return iter(self.placed)

    def add(self, shard: Shard, path: Path | None, is_stored: bool = False) -> None:
        """A shard that is whole and durable."""
        insort(self.placed, Placed(shard.first_row, shard, path, is_stored))

    def holding(self, rows: np.ndarray) -> Iterator[tuple[Placed, np.ndarray]]:
        """The shards of these rows, and which of them each has, as a mask."""
        firsts = np.array([placed.first_row for placed in self.placed], dtype=np.int64)
        number = np.searchsorted(firsts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            yield self.placed[at], number == at

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[Part]:
        """Rows that become `places` of a batch, all of them in files that are here.

        Raises:
            ReplayCorrupt: a file is not what was written.
        """
        for placed, is_here in self.holding(rows):
            yield from self.opened(placed).find(rows[is_here] - placed.first_row, places[is_here])

    def opened(self, placed: Placed) -> MappedShard:
        """The rows of a shard that is here."""
        assert placed.path is not None
        if placed.mapped is None:
            placed.mapped = MappedShard(self._disk, placed.path, placed.shard)
        return placed.mapped

    def touched(self, part: Part) -> None:
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

    def drop_before(self, row: int) -> list[Shard]:
        """Take out the shards that end before a row; gives those that the store holds."""
        gone = [placed for placed in self.placed if placed.shard.end <= row]
        self.placed = self.placed[len(gone) :]
        for placed in gone:
            self.leave(placed)
        return [placed.shard for placed in gone if placed.is_stored]

    def leave(self, placed: Placed) -> None:
        """Forget the file of a shard, which is removed by the next `sweep`."""
        if placed.path is not None:
            self.doomed.append(placed.path)
        if placed.mapped is not None:
            self._touched.pop(id(placed.mapped), None)
        placed.path = placed.mapped = None

    def sweep(self) -> None:
        """Remove the files that were left."""
        for path in self.doomed:
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._disk.unlink(path)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    _log.warning("%s could not be removed: %s", path, error)
        self.doomed = []
