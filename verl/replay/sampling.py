"""Sampling from the replay buffer: which old rows a step uses, from an index of all rows and counter-based noise.

    t_i = -log(u_i) / w_i,    u_i = uniform(seed, step, number of i)    the smallest t are taken

This draws without replacement with probabilities in proportion to the weights. The t of a row depends on that row
alone, not on the other rows, their order or the number of processes. So a row that cannot be read is replaced by the
next one, and all other sampled rows stay the same.

Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir", in its exponential form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from verl.ops.sampling import REPLAY, uniform

if TYPE_CHECKING:
    from verl.replay.shard import RowIndex

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


def choose(
    index: RowIndex,
    request: ReplayRequest,
    left_out: np.ndarray,
    sampling: SamplingStrategy,
    half_life: float,
    seed: int,
) -> np.ndarray:
    """Numbers of the sampled rows, ascending.

    Args:
        index: of all rows.
        left_out: rows that cannot be sampled now, [len(index)].
        sampling, half_life: see `weights_of`.
        seed: of the run.
    """
    staleness = request.version - index["policy_version"].astype(np.int64)
    fits = index["is_there"] & ~left_out
    if request.max_staleness is not None:
        fits &= staleness <= request.max_staleness
    numbers, sizes = np.arange(index.first, index.end), np.ones(len(index), dtype=np.int64)
    heads, advantage = np.arange(len(index)), np.abs(index["advantage"])
    if request.whole_groups and len(index):
        groups = index["group"]
        heads = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
        sizes = np.diff(heads, append=len(index))
        fits, staleness = np.logical_and.reduceat(fits, heads), np.maximum.reduceat(staleness, heads)
        advantage, numbers = np.add.reduceat(advantage, heads) / sizes, groups[heads]
    (able,) = np.nonzero(fits)
    weights = weights_of(sampling, staleness[able], advantage[able], half_life)
    taken = able[draw(numbers[able], weights, sizes[able], request.num_rows, seed, request.step)]
    spans = [np.arange(first, first + size) for first, size in zip(heads[taken].tolist(), sizes[taken].tolist())]
    return index.first + np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


def draw(numbers: np.ndarray, weights: np.ndarray, sizes: np.ndarray, most: int, seed: int, step: int) -> np.ndarray:
    """Sample items without replacement, in order of t_i (see the module), until the next item does not fit.

    Args:
        numbers: int64, numbers of rows or groups, which seed their noise.
        weights: positive.
        sizes: rows of each item.
        most: rows in all.
        seed, step: of the noise.
    Returns:
        Indices into `numbers`, ascending.
    """
    noise = uniform(seed, step, torch.from_numpy(numbers), torch.zeros(1, dtype=torch.int64), 0, REPLAY).numpy()
    with np.errstate(divide="ignore"):
        times = -np.log(noise) / weights
    enough = min(len(times), most)  # each has at least one row
    first = np.argpartition(times, enough - 1)[:enough] if 0 < enough < len(times) else np.arange(len(times))
    order = first[np.lexsort((numbers[first], times[first]))]
    return np.sort(order[np.cumsum(sizes[order]) <= most])
