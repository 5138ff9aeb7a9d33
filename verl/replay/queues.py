"""Rows in memory, oldest first: those of the hot layer, and those that are not on the disk yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from verl.replay.rows import Part, Segment


class SegmentQueue:
    """Segments one after another, without gaps.

    Attributes:
        num_bytes: of all segments.
    """

    def __init__(self) -> None:
        self._segments: deque[tuple[int, Segment]] = deque()
        self.num_bytes = 0

    @property
    def first(self) -> int | None:
        """The number of the oldest row; None where there is none."""
        return self._segments[0][0] if self._segments else None

    @property
    def end(self) -> int:
        """The number of the row after the newest; 0 where there is none."""
        return self._segments[-1][0] + self._segments[-1][1].num_rows if self._segments else 0

    def append(self, first_row: int, segment: Segment) -> None:
        """Newer rows."""
        assert not self._segments or first_row == self.end
        self._segments.append((first_row, segment))
        self.num_bytes += segment.num_bytes

    def prepend(self, first_row: int, segment: Segment) -> None:
        """Older rows."""
        assert not self._segments or first_row + segment.num_rows == self.first
        self._segments.appendleft((first_row, segment))
        self.num_bytes += segment.num_bytes

    def drop_before(self, row: int) -> None:
        """Let go of the segments that end before this row."""
        while self._segments and self._segments[0][0] + self._segments[0][1].num_rows <= row:
            self.num_bytes -= self._segments.popleft()[1].num_bytes

    def trim(self, num_bytes: int) -> None:
        """Let go of the oldest segments until so many bytes are left, at most."""
        while self._segments and self.num_bytes > num_bytes:
            self.num_bytes -= self._segments.popleft()[1].num_bytes

    def find(self, rows: np.ndarray, places: np.ndarray) -> Iterator[Part]:
        """Rows that are here, and become `places` of a batch."""
        firsts = np.array([first for first, _ in self._segments])
        number = np.searchsorted(firsts, rows, side="right") - 1
        for at in np.unique(number).tolist():
            is_here = number == at
            yield Part(self._segments[at][1], rows[is_here] - firsts[at], places[is_here])
