"""Advantages against hand-computed numbers, a slow definition, and invariances."""

import pytest
import torch

from verl.algorithms.advantages import GAE, GRPO, AdvantageEstimator
from verl.algorithms.critic_free_advantages import OPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax
from verl.protocol import DataProto

ESTIMATORS = [
    GAE(gamma=0.97, lam=0.9),
    GAE(gamma=0.97, lam=0.9, whiten=False),
    GRPO(),
    GRPO(normalize_std=False),
    RLOO(),
    OPO(),
    ReinforcePlusPlus(gamma=0.9),
    ReinforcePlusPlusBaseline(),
    ReMax(gamma=0.9),
]


GROUPED = [RLOO(), OPO(), ReinforcePlusPlusBaseline()]


def batch_of(rewards, mask=None, dtype=torch.float64, **fields):
    rewards = torch.tensor(rewards, dtype=dtype)
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    fields = {"group_ids": [0] * len(rewards), **fields}
    tensors = {k: torch.tensor(x, dtype=None if k == "group_ids" else dtype) for k, x in fields.items()}
    return DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask, **tensors})


def random_batch(rows=12, length=9, seed=0):
    """Holes within responses, responses of one token and of none; what is off the mask is 0, as the contract says."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[1] = False
    mask[2] = torch.arange(length) == 4
    rewards, values = (torch.randn(rows, length, dtype=torch.float64, generator=generator) * mask for _ in range(2))
    return DataProto.from_dict(
        {
            "token_level_rewards": rewards,
            "response_mask": mask,
            "values": values,
            "group_ids": torch.arange(rows) // 3,
            "greedy_scores": torch.randn(rows, dtype=torch.float64, generator=generator),
        }
    )


def changed(batch, **fields):
    others = batch.select(batch_keys=[name for name in batch.batch if name not in fields])
    return others.union(DataProto.from_dict(fields))


def slow_gae(rewards, values, mask, gamma, lam):
    """The recursion of the paper on each row's own tokens, put together without the holes."""
    result = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        advantage = next_value = 0.0
        for t in reversed(mask[row].nonzero().squeeze(-1).tolist()):
            delta = rewards[row, t].item() + gamma * next_value - values[row, t].item()
            advantage = delta + gamma * lam * advantage
            next_value = values[row, t].item()
            result[row, t] = advantage
    return result


def test_gae_on_a_worked_example():
    batch = batch_of([[0.0, 0.0, 1.0]], values=[[0.5, 0.4, 0.3]])
    credit = GAE(gamma=1.0, lam=0.5, whiten=False)(batch)
    # deltas -0.1, -0.1, 0.7; from the end: 0.7, -0.1 + 0.35, -0.1 + 0.125
    assert credit["advantages"].tolist()[0] == pytest.approx([0.025, 0.25, 0.7], abs=1e-15)
    assert credit["returns"].tolist()[0] == pytest.approx([0.525, 0.65, 1.0], abs=1e-15)


def test_gae_discounts_by_gamma():
    batch = batch_of([[1.0, 2.0]], values=[[0.5, 0.25]])
    # deltas 1 + 0.5 * 0.25 - 0.5 and 2 - 0.25; decay 0.5 * 0.8
    credit = GAE(gamma=0.5, lam=0.8, whiten=False)(batch)
    assert credit["advantages"].tolist()[0] == pytest.approx([0.625 + 0.4 * 1.75, 1.75], abs=1e-15)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_equals_the_paper_recursion_row_by_row(gamma, lam):
    batch = random_batch()
    credit = GAE(gamma=gamma, lam=lam, whiten=False)(batch)
    expected = slow_gae(batch["token_level_rewards"], batch["values"], batch["response_mask"], gamma, lam)
    assert torch.allclose(credit["advantages"], expected, rtol=0, atol=1e-13)
    assert torch.allclose(credit["returns"], (expected + batch["values"]) * batch["response_mask"], rtol=0, atol=1e-13)


def test_gae_with_lam_one_is_the_monte_carlo_return_less_the_value():
    batch = random_batch()
    to_go = batch["token_level_rewards"].flip(-1).cumsum(-1).flip(-1)
    credit = GAE(gamma=1.0, lam=1.0, whiten=False)(batch)
    mask = batch["response_mask"]
    assert torch.allclose(credit["advantages"], (to_go - batch["values"]) * mask, atol=1e-13)
    assert torch.allclose(credit["returns"], to_go * mask, atol=1e-13)


def test_gae_skips_tool_output_in_the_middle():
    plain = batch_of([[0.5, 0.0, 1.0]], values=[[0.1, 0.2, 0.3]])
    holed = batch_of(
        [[0.5, 9.0, 9.0, 0.0, 9.0, 1.0]], mask=[[1, 0, 0, 1, 0, 1]], values=[[0.1, 7.0, 7.0, 0.2, 7.0, 0.3]]
    )
    estimator = GAE(gamma=0.9, lam=0.8, whiten=False)
    expected, found = estimator(plain), estimator(holed)
    for name in ("advantages", "returns"):
        assert torch.equal(found[name][:, [0, 3, 5]], expected[name])
        assert found[name][:, [1, 2, 4]].count_nonzero() == 0


def test_gae_of_one_token_is_reward_less_value():
    credit = GAE(gamma=0.9, lam=0.9, whiten=False)(batch_of([[2.0], [1.0]], values=[[0.5], [3.0]]))
    assert credit["advantages"].tolist() == [[1.5], [-2.0]]
    assert credit["returns"].tolist() == [[2.0], [1.0]]


def test_whitening_touches_the_advantages_and_not_the_returns():
    batch = random_batch()
    plain, white = GAE(lam=0.9, whiten=False)(batch), GAE(lam=0.9, whiten=True)(batch)
    mask = batch["response_mask"]
    assert torch.equal(plain["returns"], white["returns"])
    assert white["advantages"][mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert white["advantages"][mask].std(unbiased=False).item() == pytest.approx(1, abs=1e-6)
    assert torch.corrcoef(torch.stack([plain["advantages"][mask], white["advantages"][mask]]))[0, 1] > 1 - 1e-12


def test_group_relative_on_a_worked_example():
    batch = batch_of([[0.0, 1.0], [0.0, 3.0], [1.0, 4.0]], group_ids=[7, 7, 7])
    credit = GRPO(epsilon=1e-12)(batch)
    # Rewards 1, 3, 5: mean 3, sample std 2.
    assert credit["advantages"].tolist() == [pytest.approx([a, a], abs=1e-11) for a in (-1, 0, 1)]
    assert credit["returns"].tolist() == [[1, 1], [3, 3], [5, 5]]
    assert GRPO(normalize_std=False)(batch)["advantages"].tolist() == [[-2, -2], [0, 0], [2, 2]]


def test_group_relative_adds_epsilon_to_the_std():
    batch = batch_of([[0.0], [2.0]], group_ids=[0, 0])
    advantages = GRPO(epsilon=0.5)(batch)["advantages"].flatten().tolist()
    assert advantages == pytest.approx([-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)], abs=1e-15)


def test_group_relative_equals_a_loop_over_groups_that_are_mixed_and_of_any_label():
    batch = random_batch(rows=30, seed=3)
    group_ids = torch.tensor([-5, 900, 2**40, 3, 0])[torch.arange(30) % 5]
    batch = changed(batch, group_ids=group_ids)
    credit = GRPO(epsilon=1e-6)(batch)
    mask = batch["response_mask"]
    scores = (batch["token_level_rewards"] * mask).sum(-1)
    for label in group_ids.unique():
        rows = (group_ids == label) & mask.any(-1)
        expected = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
        assert torch.allclose(credit["advantages"][rows], expected[:, None] * mask[rows], atol=1e-12)


@pytest.mark.parametrize("reward", [0.1, -1 / 3, 1e6 + 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", [GRPO(), GRPO(normalize_std=False), *GROUPED], ids=str)
def test_equal_rewards_and_groups_of_one_give_exact_zeros(estimator, reward, dtype):
    mask = [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    batch = batch_of([[reward, 0.0, 0.0]] * 7 + [[5.0, 0.0, 0.0]], mask, dtype, group_ids=[4] * 7 + [1])
    credit = estimator(batch)
    assert credit["advantages"].count_nonzero() == 0
    assert credit["advantages"].dtype is dtype


@pytest.mark.parametrize("estimator", [GRPO(), ReinforcePlusPlus(), ReinforcePlusPlusBaseline(), GAE()])
def test_rewards_whose_squares_overflow_are_still_told_apart(estimator):
    small, large = (
        estimator(
            batch_of([[x], [3 * x], [2 * x], [6 * x]], dtype=torch.float32, group_ids=[0, 0, 1, 1], values=[[0]] * 4)
        )
        for x in (10.0, 1e25)
    )
    assert torch.allclose(large["advantages"], small["advantages"], rtol=1e-5)
    assert large["advantages"].abs().max() > 0.5
    assert large["advantages"].dtype == torch.float32


def test_a_row_with_an_empty_mask_gives_zeros_and_leaves_its_siblings_alone():
    batch = batch_of([[1.0], [3.0], [0.0]], mask=[[1], [1], [0]], group_ids=[0, 0, 0])
    credit = GRPO(normalize_std=False)(batch)
    assert credit["advantages"].tolist() == [[-1], [1], [0]]
    assert credit["returns"].tolist() == [[1], [3], [0]]
    only_empty = batch_of([[0.0], [0.0]], mask=[[0], [0]], group_ids=[0, 0], values=[[0.0], [0.0]])
    only_empty = changed(only_empty, greedy_scores=torch.tensor([1.0, 2.0], dtype=torch.float64))
    for estimator in ESTIMATORS:
        assert estimator(only_empty)["advantages"].tolist() == [[0], [0]]


def relabelled(batch):
    return changed(batch, group_ids=torch.tensor([70, -3, 12, 5])[batch["group_ids"]])


def padded(batch):
    """Wider, with other numbers off the mask."""
    mask = torch.nn.functional.pad(batch["response_mask"], (0, 4))
    dirty = {
        name: torch.nn.functional.pad(torch.where(batch["response_mask"], batch[name], 1e9), (0, 4), value=torch.nan)
        for name in ("token_level_rewards", "values")
    }
    return changed(batch.select(["group_ids", "greedy_scores"]), response_mask=mask, **dirty)


ORDER = torch.randperm(12, generator=torch.Generator().manual_seed(1))
CHANGES = {  # a change of the batch, and what it does to the result
    "the order of rows": (lambda batch: batch[ORDER], lambda x: x[ORDER]),
    "labels of the groups": (relabelled, lambda x: x),
    "padding": (padded, lambda x: torch.nn.functional.pad(x, (0, 4))),
}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_what_must_not_matter_changes_nothing(change, estimator):
    batch, (alter, expected) = random_batch(), CHANGES[change]
    for name in ("advantages", "returns"):
        found = estimator(alter(batch))[name]
        assert torch.allclose(found, expected(estimator(batch)[name]), rtol=0, atol=1e-13)
        assert found[~alter(batch)["response_mask"]].count_nonzero() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (4, 1)])
def test_empty_batches_and_one_token_responses_keep_shape_and_dtype(estimator, dtype, shape):
    batch = DataProto.from_dict(
        {
            "token_level_rewards": torch.ones(shape, dtype=dtype),
            "response_mask": torch.ones(shape, dtype=torch.bool),
            "values": torch.zeros(shape, dtype=dtype),
            "group_ids": torch.zeros(shape[0], dtype=torch.int64),
            "greedy_scores": torch.zeros(shape[0], dtype=dtype),
        }
    )
    credit = estimator(batch)
    for x in credit.batch.values():
        assert (x.shape, x.dtype, bool(x.isfinite().all())) == (shape, dtype, True)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_the_result_joins_its_batch_and_carries_no_gradient(estimator):
    batch = random_batch()
    batch = changed(batch, values=batch["values"].requires_grad_())
    credit = estimator(batch)
    assert set(credit.batch) == {"advantages", "returns"}
    assert not credit["advantages"].requires_grad
    assert not credit["returns"].requires_grad
    assert "advantages" in batch.union(credit)
    assert "advantages" not in batch


# Estimators near REINFORCE


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


def test_estimators_say_what_they_need():
    assert (AdvantageEstimator.needs_values, AdvantageEstimator.needs_groups) == (False, False)
    assert (GAE.needs_values, GAE.needs_groups) == (True, False)
    assert (GRPO.needs_values, GRPO.needs_groups) == (False, True)
    assert all(estimator.needs_groups and not estimator.needs_values for estimator in GROUPED)
    assert (ReinforcePlusPlus.needs_groups, ReinforcePlusPlus.needs_greedy_baseline) == (False, False)
    assert (ReMax.needs_groups, ReMax.needs_greedy_baseline) == (False, True)
