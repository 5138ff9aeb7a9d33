"""Index of a replay buffer: columns that sampling needs of every row, and the shards that hold the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from verl.replay.shard import Shard, split_rows

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
