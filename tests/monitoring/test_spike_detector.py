"""A band tells of a value that is far from what a metric usually is, once, and of nothing else."""

from __future__ import annotations

import math
import random

import pytest

from verl.monitoring.nonfinite import SpikeDetector


def band(factor: float = 10.0, history: int = 20, window: int = 100) -> SpikeDetector:
    return SpikeDetector("actor/loss", factor, history, window)


def noise(count: int, mean: float = 1.0, spread: float = 0.1) -> list[float]:
    generator = random.Random(0)
    return [generator.gauss(mean, spread) for _ in range(count)]


def test_the_limit_is_the_median_and_a_multiple_of_the_deviation():
    watched = band(factor=2.0, history=5)
    assert [watched.add(x) for x in (1.0, 2.0, 3.0, 4.0, 5.0)] == [None] * 5
    spike = watched.add(-6.0)  # by size, so below zero as well
    assert spike is not None
    assert (spike.median, spike.steps, spike.value) == (3.0, 5, -6.0)
    assert spike.limit == pytest.approx(3.0 + 2.0 * 1.4826 * 1.0)
    assert str(spike) == "actor/loss -6 (median 3, limit 5.965, 5 steps)"


def test_a_sound_course_has_no_spike_even_if_it_drifts_or_starts_wild():
    for course in (noise(500), [x + step / 100 for step, x in enumerate(noise(500))], [100.0, 1e6, 50.0, *noise(200)]):
        watched = band()
        assert [spike for x in course if (spike := watched.add(x)) is not None] == []


def test_nothing_is_told_before_there_is_a_history():
    watched = band(history=20)
    assert [watched.add(x) for x in [0.0] * 10 + [1e9] * 9] == [None] * 19


def test_a_metric_that_stays_beyond_its_band_is_told_once_until_it_was_back():
    watched = band(history=5)
    course = [1.0] * 30 + [50.0] * 4 + [1.0] * 3 + [50.0]
    assert [step for step, x in enumerate(course) if watched.add(x) is not None] == [30, 37]


def test_the_band_follows_to_a_new_level():
    watched = band(history=5, window=20)
    told = [step for step, x in enumerate([1.0] * 20 + [9.0] * 30 + [9.5] * 10) if watched.add(x) is not None]
    assert told == [20]


def test_rounding_around_zero_is_no_spike():
    watched = band(history=5)
    assert [watched.add(x) for x in [0.0] * 20 + [1e-6, -1e-4, 5e-3]] == [None] * 23


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_to_others_and_does_not_enter_the_band(wrong):
    watched = band(history=3)
    assert [watched.add(x) for x in (1.0, wrong, 1.0, wrong, wrong, 1.0)] == [None] * 6
    spike = watched.add(9.0)
    assert spike is not None
    assert spike.steps == 3
