"""Intervals of 95 %: of the difference of two evaluations of the same prompts, and of a mean over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEAST_SEEDS = 3  # two values say nothing about their spread
# 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom; later ones are below the last by less than 4 %
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean with the ends of its 95 % interval, and the number of values that it is of."""

    mean: float
    low: float
    high: float
    count: int


def paired_bootstrap(first: Mapping[int, float], second: Mapping[int, float], seed: int = 0) -> Interval | None:
    """Interval of the mean of `second` minus `first` over the prompts that both have.

    Prompts are drawn with replacement `RESAMPLES` times; the interval is from the 2.5 % to the 97.5 % quantile of the
    means. Source: Efron and Tibshirani 1993, section 13.3. It covers the choice of prompts, not that of the run's seed.

    Args:
        first, second: value of each prompt, such as its pass rate.
    Returns:
        None if they share fewer than two prompts.
    """
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        return None
    values = np.array([second[prompt] - first[prompt] for prompt in shared])
    generator = np.random.default_rng(seed)
    means = [values[generator.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high), len(values))


def interval_over_seeds(values: Sequence[float]) -> Interval | None:
    """Interval of the mean by Student's t; None for fewer than three values."""
    if len(values) < LEAST_SEEDS:
        return None
    mean = statistics.fmean(values)
    reach = student_t(len(values)) * statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, mean - reach, mean + reach, len(values))


def student_t(count: int) -> float:
    """The 97.5 % quantile of Student's t for the mean of so many values."""
    return STUDENT_T[min(count - 1, len(STUDENT_T)) - 1]
