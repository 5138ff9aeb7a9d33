"""Which old rows a step takes: a race of all that may be taken, decided by their weights and counted noise.

    t_i = -log(u_i) / w_i,    u_i = uniform(seed, step, number of i)    the first to arrive are taken

This draws without replacement with probabilities in proportion to the weights. Every runner's time is its own: who
takes part, in which order, on how many processes, changes nothing for the others. So a row that cannot be read is
replaced by the next in the race, and all others stay.

Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir", in its exponential form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from verl.ops.counter_rng import REPLAY, uniform

Sampling = Literal["uniform", "recency", "advantage"]
LEAST_ADVANTAGE = 1e-3  # of the largest: rows that taught nothing yet may still be drawn


@dataclass(frozen=True)
class Wanted:
    """What a step asks of the buffer.

    Attributes:
        num_rows: at most.
        step: keys the noise, with the seed.
        version: the policy's, from which staleness is counted.
        max_staleness: policy versions that a row may be behind; None for any.
        whole_groups: take all responses to a prompt or none.
    """

    num_rows: int
    step: int
    version: int
    max_staleness: int | None = None
    whole_groups: bool = False


def weights_of(sampling: Sampling, staleness: np.ndarray, advantage: np.ndarray, half_life: float) -> np.ndarray:
    """How likely rows are drawn, relative to each other; float64, above 0.

    Args:
        staleness: policy versions since each row was drawn.
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
    """The first to arrive, as long as they fit.

    Args:
        numbers: int64, the names of the runners, which key their noise.
        weights: above 0.
        sizes: rows that each of them brings.
        wanted: rows in all, at most.
    Returns:
        Places in `numbers`, ascending.
    """
    noise = uniform(seed, step, torch.from_numpy(numbers), torch.zeros(1, dtype=torch.int64), 0, REPLAY).numpy()
    with np.errstate(divide="ignore"):
        times = -np.log(noise) / weights
    enough = min(len(times), wanted)  # each brings a row at least
    first = np.argpartition(times, enough - 1)[:enough] if 0 < enough < len(times) else np.arange(len(times))
    order = first[np.lexsort((numbers[first], times[first]))]
    return np.sort(order[np.cumsum(sizes[order]) <= wanted])
