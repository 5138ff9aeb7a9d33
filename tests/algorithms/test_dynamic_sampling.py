"""Groups of mixed rewards are kept, the others left out."""

import pytest
import torch

from verl.algorithms.dynamic_sampling import (
    DynamicSampling,
    concat_groups,
    kept_groups,
    no_group_error,
    selection_metrics,
)
from verl.protocol import DataProto


def rows_of(scores, group_ids):
    return DataProto.from_dict({"group_ids": torch.tensor(group_ids)}, {"score": [float(x) for x in scores]})


def test_a_group_is_kept_whole_if_its_scores_differ_and_left_out_if_not():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    groups = torch.tensor([5, 2, 5, 2, 5, 9, 7])
    assert DynamicSampling()(scores, groups).tolist() == [True, True, True, True, True, False, False]


@pytest.mark.parametrize("score", [0.1, -1 / 3, 1e6 + 0.7])
def test_equal_scores_are_never_mixed(score):
    scores = torch.full((7,), score, dtype=torch.float64)
    assert not DynamicSampling()(scores, torch.zeros(7, dtype=torch.int64)).any()


def test_groups_of_all_rounds_are_joined_under_numbers_of_their_own():
    drawn = [rows_of([1, 1, 0, 1], [0, 0, 1, 1]), rows_of([0, 2, 3, 3], [0, 0, 1, 1])]
    kept = kept_groups(drawn, DynamicSampling())
    assert [group["score"].tolist() for group in kept] == [[0, 1], [0, 2]]
    rows = concat_groups(kept)
    assert rows["group_ids"].tolist() == [0, 0, 1, 1]
    assert rows["score"].tolist() == [0, 1, 0, 2]
    assert selection_metrics(drawn, kept) == {
        "selection/rounds": 2,
        "selection/groups": 4,
        "selection/kept_share": 0.5,
        "selection/reward_mean": 11 / 8,
        "selection/skipped": 0,
    }


def test_a_step_without_a_group_says_so():
    drawn = [rows_of([1, 1], [0, 0])]
    metrics = selection_metrics(drawn, [])
    assert (metrics["selection/skipped"], metrics["perf/samples"]) == (1, 0)
    assert "1 prompts in 1 rounds (rewards from 1 to 1)" in str(no_group_error(drawn))
