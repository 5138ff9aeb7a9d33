"""The running mean and variance of scores, against those of all scores at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.rewards.normalization import RunningStats

BATCHES = st.lists(st.lists(st.floats(-1e3, 1e3), max_size=7), min_size=1, max_size=6)


@given(BATCHES)
def test_batches_give_the_mean_and_variance_of_all_scores_at_once(batches):
    norm, every = RunningStats(), np.array([score for batch in batches for score in batch])
    for batch in batches:
        norm.update(np.array(batch))
    assert norm.count == len(every)
    if len(every):
        assert norm.mean == pytest.approx(every.mean(), abs=1e-9)
        assert norm.variance == pytest.approx(every.var(), abs=1e-6)


def test_scores_are_put_on_the_scale_of_those_taken_in():
    norm = RunningStats()
    assert list(norm(np.array([3.0]))) == [3.0]  # nothing was taken in
    norm.update(np.array([1.0, 3.0]))
    norm.update(np.array([5.0, 7.0]))
    assert norm(np.array([4.0, 4.0 + 5**0.5])) == pytest.approx([0.0, 1.0])


def test_equal_scores_become_zero_and_a_large_offset_leaves_the_spread():
    norm = RunningStats()
    norm.update(np.full(5, 0.1))
    assert norm(np.full(2, 0.1)) == pytest.approx([0.0, 0.0], abs=1e-15)
    norm.reset()
    norm.update(np.array([1e6 - 1, 1e6 + 1]))
    assert norm(np.array([1e6 + 1])) == pytest.approx([1.0])


def test_the_state_goes_on_where_it_was_left_and_a_reset_forgets_it():
    one, other = RunningStats(), RunningStats()
    one.update(np.array([1.0, 2.0, 4.0]))
    other.load_state_dict(one.state_dict())
    for norm in (one, other):
        norm.update(np.array([8.0, 9.0]))
    assert one.state_dict() == other.state_dict()
    one.reset()
    assert one.state_dict() == RunningStats().state_dict()
