"""The estimators near REINFORCE against hand-computed numbers."""

from __future__ import annotations

import pytest
import torch
from refusals import refusal

from verl.algorithms.advantages import GRPO
from verl.algorithms.critic_free_advantages import OPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax
from verl.protocol import DataProto

GROUPED = [RLOO(), OPO(), ReinforcePlusPlusBaseline()]


def batch_of(rewards, mask=None, group_ids=None, dtype=torch.float64, **fields):
    rewards = torch.tensor(rewards, dtype=dtype)
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    groups = torch.tensor([0] * len(rewards) if group_ids is None else group_ids)
    others = {name: torch.tensor(value, dtype=dtype) for name, value in fields.items()}
    return DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask, "group_ids": groups, **others})


def test_leave_one_out_compares_a_response_with_the_mean_of_the_others():
    batch = batch_of([[0.0, 1.0], [0.0, 3.0], [1.0, 4.0], [2.0, 0.0]], group_ids=[7, 7, 7, 3])
    credit = RLOO()(batch)
    # Rewards 1, 3, 5: the others average 4, 3, 2. The group of one gives 0.
    assert credit["advantages"].tolist() == [pytest.approx([a, a], abs=1e-14) for a in (-3, 0, 3, 0)]
    assert credit["returns"].tolist() == [[1, 1], [3, 3], [5, 5], [2, 2]]


def test_the_optimal_baseline_weighs_each_reward_by_its_length():
    batch = batch_of([[1.0, 0, 0], [0, 0, 4.0], [0, 0, 0]], mask=[[1, 0, 0], [1, 1, 1], [0, 0, 0]], group_ids=[0, 0, 0])
    # Lengths 1 and 3: (1 * 1 + 3 * 4) / 4 = 3.25; the empty response counts nowhere.
    credit = OPO()(batch)
    assert credit["advantages"].tolist() == [[-2.25, 0, 0], [0.75, 0.75, 0.75], [0, 0, 0]]
    assert credit["returns"].tolist() == [[1, 0, 0], [4, 4, 4], [0, 0, 0]]


def test_the_optimal_baseline_of_equal_lengths_is_the_mean_of_the_group():
    batch = batch_of([[0.5, 1.0], [0.0, 3.0], [1.0, 4.0]])
    expected = GRPO(normalize_std=False)(batch)["advantages"]
    assert torch.allclose(OPO()(batch)["advantages"], expected, rtol=0, atol=1e-14)


def test_reward_to_go_is_whitened_over_all_tokens_of_the_batch():
    batch = batch_of([[1.0, 3.0], [2.0, 9.0]], mask=[[1, 1], [1, 0]])
    credit = ReinforcePlusPlus(gamma=0.5)(batch)
    # Returns 1 + 0.5 * 3, 3 and 2: mean 2.5, variance (0 + 0.25 + 0.25) / 3.
    std = (0.5 / 3) ** 0.5
    assert credit["returns"].tolist() == [[2.5, 3.0], [2.0, 0.0]]
    expected = [[0.0, 0.5 / std], [-0.5 / std, 0.0]]
    assert credit["advantages"].tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_group_baseline_is_whitened_over_all_tokens_of_the_batch():
    batch = batch_of(
        [[0, 2.0], [0.0, 0.0], [5.0, 0.0], [3.0, 0.0]], mask=[[1, 1], [1, 1], [1, 0], [1, 0]], group_ids=[4, 4, 9, 9]
    )
    credit = ReinforcePlusPlusBaseline()(batch)
    # Centred 1, 1, -1, -1, 1, -1 over six tokens: mean 0, variance 1.
    expected = [[1, 1], [-1, -1], [1, 0], [-1, 0]]
    assert credit["advantages"].tolist() == [pytest.approx(row, abs=1e-7) for row in expected]
    assert credit["returns"].tolist() == [[2, 2], [0, 0], [5, 0], [3, 0]]


def test_a_std_over_the_batch_does_not_blow_up_a_group_that_nearly_agrees():
    batch = batch_of([[1.0], [1.001], [0.0], [4.0]], group_ids=[0, 0, 1, 1])
    assert GRPO()(batch)["advantages"][1].item() > 0.7
    assert ReinforcePlusPlusBaseline()(batch)["advantages"][1].item() < 0.001


def test_the_greedy_baseline_is_taken_from_what_is_still_to_come():
    batch = batch_of([[-0.5, 2.0, 7.0], [0.0, 0.0, 1.0]], mask=[[1, 1, 0], [1, 1, 1]], greedy_scores=[1.0, 1.0])
    credit = ReMax()(batch)
    assert credit["advantages"].tolist() == [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert credit["returns"].tolist() == [[1.5, 2.0, 0.0], [1.0, 1.0, 1.0]]
    discounted = ReMax(gamma=0.5)(batch)["advantages"]
    assert discounted.tolist() == [[-0.5, 1.0, 0.0], [-0.75, -0.5, 0.0]]


@pytest.mark.parametrize("estimator", GROUPED, ids=str)
@pytest.mark.parametrize("reward", [0.1, -1 / 3, 1e6 + 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_equal_rewards_give_exact_zeros(estimator, reward, dtype):
    mask = [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]
    batch = batch_of([[reward, 0.0, 0.0]] * 3 + [[5.0, 0.0, 0.0]], mask, group_ids=[4, 4, 4, 1], dtype=dtype)
    assert estimator(batch)["advantages"].count_nonzero() == 0


def test_the_kinds_say_what_they_need():
    assert all(estimator.needs_groups and not estimator.needs_values for estimator in GROUPED)
    assert (ReinforcePlusPlus.needs_groups, ReinforcePlusPlus.needs_greedy_baseline) == (False, False)
    assert (ReMax.needs_groups, ReMax.needs_greedy_baseline) == (False, True)


@pytest.mark.parametrize("kind", [ReinforcePlusPlus, ReMax])
def test_a_discount_out_of_range_is_refused(kind):
    with refusal("gamma"):
        kind(gamma=1.5)
