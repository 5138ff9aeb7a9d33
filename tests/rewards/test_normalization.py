"""Rewards normalised by the running mean and variance of their scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.component import BuildContext
from verl.protocol import DataProto
from verl.rewards.function import RewardFunction
from verl.rewards.normalization import RewardNormalization, RunningStats, ScaledReward
from verl.rewards.rules import ExactMatch
from verl.rewards.weighted_sum import WeightedSum


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=7), min_size=1, max_size=6))
def test_batches_give_the_mean_and_variance_of_all_scores_at_once(batches):
    norm, every = RunningStats(), np.array([score for batch in batches for score in batch])
    for batch in batches:
        norm.update(np.array(batch))
    assert norm.count == len(every)
    if len(every):
        assert norm.mean == pytest.approx(every.mean(), abs=1e-9)
        assert norm.variance == pytest.approx(every.var(), abs=1e-6)


def test_nothing_taken_in_changes_no_score_equal_scores_become_zero_and_a_large_offset_leaves_the_spread():
    norm = RunningStats()
    assert list(norm(np.array([3.0]))) == [3.0]
    norm.update(np.full(5, 0.1))
    assert norm(np.full(2, 0.1)) == pytest.approx([0.0, 0.0], abs=1e-15)
    norm.reset()
    norm.update(np.array([1e6 - 1, 1e6 + 1]))
    assert norm(np.array([1e6 + 1])) == pytest.approx([1.0])


def batch_of(responses: list[str]) -> DataProto:
    columns = {"prompt_text": ["1+1="] * len(responses), "response_text": responses, "answer": ["2"] * len(responses)}
    return DataProto.from_dict(non_tensors={name: np.array(x, object) for name, x in columns.items()})


def test_scores_are_less_their_mean_over_their_spread_and_raw_ones_are_told():
    reward = RewardNormalization(reward=ExactMatch(correct=3.0, wrong=1.0)).build(BuildContext())
    result = reward.score_batch(batch_of(["2", "3", "2", "3"]))
    assert result.scores == pytest.approx([1.0, -1.0, 1.0, -1.0])
    assert list(result.parts["raw"]) == [3.0, 1.0, 3.0, 1.0]
    reward.score_batch(batch_of(["2", "2", "2", "2"]))
    assert reward.score_batch(batch_of([])).scores.shape == (0,)
    with reward.frozen():  # six of eight were right: mean 2.5, variance 0.75
        before = reward.state_dict()
        assert reward.score_batch(batch_of(["2"])).scores == pytest.approx([0.5 / 0.75**0.5])
        assert reward.state_dict() == before


def test_columns_of_the_reward_are_kept():
    function = RewardFunction.wrap(lambda prompts, responses: [{"score": 1.0, "read": text} for text in responses])
    assert list(ScaledReward(function).score_batch(batch_of(["2", "3"])).columns["read"]) == ["2", "3"]


def test_what_was_learned_is_a_state_and_is_forgotten_on_request():
    described = WeightedSum(parts={"match": RewardNormalization(reward=ExactMatch())}, weights={"match": 1.0})
    one, other = described.build(BuildContext()), described.build(BuildContext())
    fresh = one.state_dict()
    one.score_batch(batch_of(["2", "3", "3"]))
    other.load_state_dict(one.state_dict())
    again = batch_of(["2", "4"])
    assert list(one.score_batch(again).scores) == list(other.score_batch(again).scores)
    assert one.state_dict() == other.state_dict() != fresh
    one.reset_stats()
    assert one.state_dict() == fresh


@pytest.mark.parametrize("state", [{}, {"match": {"count": 3}}, {"count": 3, "mean": 0.5, "squares": 1.0}])
def test_the_statistics_of_another_kind_of_reward_are_no_state_of_this_one(state):
    reward = RewardNormalization(reward=ExactMatch()).build(BuildContext())
    fresh = reward.state_dict()
    reward.load_state_dict(state)
    assert reward.state_dict() == fresh
