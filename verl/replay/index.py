"""What is known of every row without reading it: which group, when it was drawn, what it earned."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

DTYPES = {
    "group": np.int64, "step": np.int32, "policy_version": np.int32, "score": np.float32, "advantage": np.float32,
    "is_there": np.bool_,
}  # fmt: skip


class RowIndex:
    """Columns of all rows of a buffer, 25 bytes a row, by row numbers that never change.

    Attributes:
        first, end: numbers of the oldest row held, and of the next one to come.
    """

    def __init__(self, first: int = 0):
        self.first = self.end = first
        self._columns = {name: np.zeros(1024, dtype) for name, dtype in DTYPES.items()}
        self._begin = 0  # where row `first` stands

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of all rows held, to be read."""
        return self._columns[name][self._begin : self._begin + len(self)]

    def append(self, columns: Mapping[str, np.ndarray], is_there: bool = True) -> None:
        """Rows after the last one.

        Args:
            is_there: false for rows that are lost: they keep their numbers.
        """
        count = len(columns["group"])
        self._make_room(count)
        at = self._begin + len(self)
        for name in DTYPES:
            self._columns[name][at : at + count] = is_there if name == "is_there" else columns[name]
        self.end += count

    def lose(self, first: int, end: int) -> int:
        """These rows cannot be read any more; how many of them could be before."""
        first, end = max(first, self.first), min(end, self.end)
        there = self["is_there"][max(0, first - self.first) : max(0, end - self.first)]
        count = int(there.sum())
        there[:] = False
        return count

    def drop_before(self, row: int) -> None:
        """Forget the rows before this one."""
        self._begin += max(0, row - self.first)
        self.first = max(self.first, row)
        self.end = max(self.end, self.first)

    def _make_room(self, count: int) -> None:
        held, room = len(self), len(self._columns["group"])
        if self._begin + held + count <= room:
            return
        wanted = room if 2 * (held + count) <= room else 2 * (held + count)
        for name, column in self._columns.items():
            larger = np.zeros(wanted, column.dtype)
            larger[:held] = column[self._begin : self._begin + held]
            self._columns[name] = larger
        self._begin = 0
