"""Sampling from the replay buffer: which old rows a step uses, from an index of all rows and counter-based noise.

    t_i = -log(u_i) / w_i,    u_i = uniform(seed, step, number of i)    the smallest t are taken

This draws without replacement with probabilities in proportion to the weights. The t of a row depends on that row
alone, not on the other rows, their order or the number of processes. So a row that cannot be read is replaced by the
next one, and all other sampled rows stay the same.

Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir", in its exponential form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from verl.ops.counter_rng import REPLAY, uniform

DTYPES = {
    "group": np.int64, "step": np.int32, "policy_version": np.int32, "score": np.float32, "advantage": np.float32,
    "is_there": np.bool_,
}  # fmt: skip


class RowIndex:
    """Index columns of all rows of a buffer, 25 bytes per row. Row numbers never change.

    Attributes:
        first, end: number of the oldest row, and of the next row to be appended.
    """

    def __init__(self, first: int = 0):
        self.first = self.end = first
        self._columns = {name: np.zeros(1024, dtype) for name, dtype in DTYPES.items()}
        self._begin = 0  # position of row `first` in the arrays

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of all rows, read-only."""
        return self._columns[name][self._begin : self._begin + len(self)]

    def append(self, columns: Mapping[str, np.ndarray], is_there: bool = True) -> None:
        """Append rows.

        Args:
            columns: [n] each.
            is_there: false for lost rows, which keep their numbers.
        """
        count = len(columns["group"])
        self._make_room(count)
        at = self._begin + len(self)
        for name in DTYPES:
            self._columns[name][at : at + count] = is_there if name == "is_there" else columns[name]
        self.end += count

    def lose(self, first: int, end: int) -> int:
        """Mark rows as lost; returns how many of them were not lost before."""
        first, end = max(first, self.first), min(end, self.end)
        there = self["is_there"][max(0, first - self.first) : max(0, end - self.first)]
        count = int(there.sum())
        there[:] = False
        return count

    def drop_before(self, row: int) -> None:
        """Remove the rows before this number."""
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


SamplingStrategy = Literal["uniform", "recency", "advantage"]
LEAST_ADVANTAGE = 1e-3  # relative to the largest: rows without advantage keep a small weight


@dataclass(frozen=True)
class ReplayRequest:
    """A request of a step for old rows.

    Attributes:
        num_rows: the most rows.
        step: seeds the sampling noise, with the run's seed.
        version: current policy version, from which staleness is counted.
        max_staleness: the most policy versions that a row may be behind; None for no limit.
        whole_groups: sample all responses to a prompt or none.
    """

    num_rows: int
    step: int
    version: int
    max_staleness: int | None = None
    whole_groups: bool = False


def weights_of(
    sampling: SamplingStrategy, staleness: np.ndarray, advantage: np.ndarray, half_life: float
) -> np.ndarray:
    """Sampling weights of rows, float64, positive.

    Args:
        sampling: the strategy.
        staleness: policy versions since each row was generated.
        advantage: mean absolute advantage of each row.
        half_life: policy versions that halve the weight under `recency`.
    """
    if sampling == "recency":
        return np.exp2(-staleness.astype(np.float64) / half_life)
    if sampling == "advantage":
        sizes = np.abs(advantage.astype(np.float64))
        return np.maximum(sizes, LEAST_ADVANTAGE * max(float(sizes.max(initial=0.0)), 1e-30))
    return np.ones(len(staleness))


def draw(numbers: np.ndarray, weights: np.ndarray, sizes: np.ndarray, wanted: int, seed: int, step: int) -> np.ndarray:
    """Sample items without replacement, in order of t_i (see the module), until the next item does not fit.

    Args:
        numbers: int64, numbers of rows or groups, which seed their noise.
        weights: positive.
        sizes: rows of each item.
        wanted: the most rows in all.
        seed, step: of the noise.
    Returns:
        Indices into `numbers`, ascending.
    """
    noise = uniform(seed, step, torch.from_numpy(numbers), torch.zeros(1, dtype=torch.int64), 0, REPLAY).numpy()
    with np.errstate(divide="ignore"):
        times = -np.log(noise) / weights
    enough = min(len(times), wanted)  # each has at least one row
    first = np.argpartition(times, enough - 1)[:enough] if 0 < enough < len(times) else np.arange(len(times))
    order = first[np.lexsort((numbers[first], times[first]))]
    return np.sort(order[np.cumsum(sizes[order]) <= wanted])
