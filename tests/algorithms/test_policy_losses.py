"""Losses of the policy: PPO's clip on each side, GSPO's ratio of a whole response, CISPO's weight without gradient."""

import math

import pytest
import torch

from verl.algorithms.losses import CISPO, GSPO, ClippedValueLoss, PPOClip

GSPO_CLIP = GSPO(clip_low=0.2, clip_high=0.3)
LOSSES = [PPOClip(), PPOClip(dual_clip=3.0), GSPO_CLIP, CISPO()]


def batch_of(advantages, mask=None, old=0.0):
    advantages = torch.tensor(advantages, dtype=torch.float64)
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return {"advantages": advantages, "old_log_probs": torch.zeros_like(advantages) + old, "response_mask": mask}


def log_probs_of(ratios):
    return torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()


def slope(advantage, weight):
    """Loss and gradient of CISPO at this clipped weight, of a ratio."""
    return lambda ratio: (-weight * advantage * math.log(ratio), -weight * advantage)


PPO, DUAL, CISPO_CLIP = PPOClip(clip_low=0.2, clip_high=0.2), PPOClip(dual_clip=3.0), CISPO(clip_low=0.4, clip_high=0.5)
# The gradient of -A * ratio in log pi is -A * ratio; where the clip decides it is 0.
CLIPPED = [  # loss, advantage, ratios of the tokens of a response, loss and gradient of each, and whether it is clipped
    (PPO, 2.0, [1.1], -2.2, -2.2, False), (PPO, 2.0, [1.5], -2.4, 0.0, True), (PPO, 2.0, [0.5], -1.0, -1.0, False),
    (PPO, -2.0, [0.9], 1.8, 1.8, False), (PPO, -2.0, [0.5], 1.6, 0.0, True), (PPO, -2.0, [1.5], 3.0, 3.0, False),
    (DUAL, -2.0, [2.9], 5.8, 5.8, False),  # below the bound: as without it
    (DUAL, -2.0, [5.0], 6.0, 0.0, True),  # beyond it: 3 * 2
    (DUAL, -2.0, [0.5], 1.6, 0.0, True),  # the low clip still acts
    (DUAL, 2.0, [5.0], -2.4, 0.0, True),  # positive advantages know only the high clip
    (GSPO_CLIP, 2.0, [1.5, 1.5], -2.6, 0.0, True), (GSPO_CLIP, -2.0, [0.5, 0.5], 1.6, 0.0, True),
    (GSPO_CLIP, 2.0, [2.0, 0.5], -2.0, -2.0, False),  # the mean of the logarithms is 0
    (GSPO_CLIP, -2.0, [1.5, 1.5], 3.0, 3.0, False),
    *((CISPO_CLIP, advantage, [ratio], *slope(advantage, weight)(ratio), weight != ratio)
      for ratio, weight in ((1.0, 1.0), (1.4, 1.4), (9.0, 1.5), (0.2, 0.6)) for advantage in (2.0, -2.0)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "advantage", "ratios", "loss", "gradient", "is_clipped"), CLIPPED, ids=str)
def test_the_clip_acts_only_where_the_policy_has_moved_far_enough(kind, advantage, ratios, loss, gradient, is_clipped):
    log_probs = log_probs_of([ratios])
    per_token, stats = kind(log_probs, batch_of([[advantage] * len(ratios)]))
    per_token.sum().backward()
    assert per_token[0].tolist() == pytest.approx([loss] * len(ratios), abs=1e-13)
    assert log_probs.grad[0].tolist() == pytest.approx([gradient] * len(ratios), abs=1e-13)
    assert stats["clip_fraction"].tolist() == [[is_clipped] * len(ratios)]
    if kind is CISPO_CLIP:
        assert stats["ratio"].item() == pytest.approx(ratios[0])


def test_the_two_bounds_are_separate():
    per_token, stats = PPOClip(clip_low=0.1, clip_high=0.4)(
        log_probs_of([[1.5, 1.3, 0.8]]), batch_of([[1.0, 1.0, -1.0]])
    )
    assert per_token[0].tolist() == pytest.approx([-1.4, -1.3, 0.9], abs=1e-14)
    assert stats["clip_fraction"].tolist() == [[1, 0, 1]]


def test_approx_kl_averages_to_the_exact_kl_of_old_to_new():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(1, 9, dtype=torch.float64, generator=generator).log_softmax(-1) for _ in range(2))
    _, stats = PPOClip()(new, batch_of([[1.0] * 9], old=old))
    exact = (old.exp() * (old - new)).sum().item()
    assert (old.exp() * stats["approx_kl"]).sum().item() == pytest.approx(exact, rel=1e-12)


def test_the_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(1, 30, dtype=torch.float64, generator=generator).requires_grad_()
    batch = batch_of([torch.randn(30, dtype=torch.float64, generator=generator).tolist()])
    loss = PPOClip(clip_low=0.2, clip_high=0.3, dual_clip=2.0)
    assert torch.autograd.gradcheck(lambda x: loss(x, batch)[0], log_probs)


# Ratios of GSPO and CISPO


def test_the_ratio_of_a_response_is_the_geometric_mean_of_its_tokens():
    log_probs, batch = log_probs_of([[1.1, 1.21, 50.0]]), batch_of([[2.0, 2.0, 2.0]], mask=[[1, 1, 0]])
    per_token, stats = GSPO_CLIP(log_probs, batch)
    per_token.sum().backward()
    ratio = math.sqrt(1.1 * 1.21)
    assert per_token.tolist() == [pytest.approx([-2 * ratio, -2 * ratio, 0], abs=1e-14)]
    # Through its own token, each of the two has slope ratio * A, as the mean over tokens of eq. 5 has.
    assert log_probs.grad.tolist() == [pytest.approx([-2 * ratio, -2 * ratio, 0], abs=1e-14)]
    assert stats["ratio"].tolist() == [pytest.approx([ratio, ratio, 0], abs=1e-14)]


def test_the_gradient_of_a_response_is_that_of_its_scalar_objective():
    log_probs = log_probs_of([[1.1, 0.8, 1.3]])
    per_token, _ = GSPO(clip_low=0.9, clip_high=0.9)(log_probs, batch_of([[1.5] * 3]))
    (found,) = torch.autograd.grad(per_token.mean(), log_probs)
    (expected,) = torch.autograd.grad(-1.5 * log_probs.mean(dim=-1).exp().sum(), log_probs)
    assert torch.allclose(found, expected, rtol=0, atol=1e-15)


def test_a_response_of_one_token_has_the_loss_of_ppo():
    batch, log_probs = batch_of([[2.0], [-1.0], [1.0]]), log_probs_of([[1.5], [0.4], [0.9]])
    found, _ = GSPO_CLIP(log_probs, batch)
    expected, _ = PPOClip(clip_low=0.2, clip_high=0.3)(log_probs, batch)
    assert torch.allclose(found, expected, rtol=0, atol=1e-15)


# All of them


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(loss):
    log_probs = torch.full((3, 1), -1.5, dtype=torch.float64, requires_grad=True)
    per_token, stats = loss(log_probs, batch_of([[3.0], [-0.5], [0.0]], old=-1.5))
    per_token.sum().backward()
    assert log_probs.grad.tolist() == [[pytest.approx(x, abs=1e-15)] for x in (-3.0, 0.5, 0.0)]
    assert stats["ratio"].tolist() == [[1], [1], [1]]
    assert stats["clip_fraction"].count_nonzero() == stats["approx_kl"].count_nonzero() == 0


VALUE_LOSSES = [ClippedValueLoss(clip=None), ClippedValueLoss(clip=0.2)]


def is_of_values(loss):
    return isinstance(loss, ClippedValueLoss)


@pytest.mark.parametrize("loss", [*LOSSES, *VALUE_LOSSES], ids=str)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e9])
def test_what_stands_off_the_mask_changes_nothing(loss, garbage):
    mask = [[1, 0, 1], [0, 0, 0]]
    clean = batch_of([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]], mask)
    if is_of_values(loss):
        clean = {
            "values": clean["old_log_probs"],
            "returns": clean["advantages"],
            "response_mask": clean["response_mask"],
        }
    given = torch.tensor([[0.1, 0.0, -0.2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    on = clean["response_mask"]
    dirty = {name: x if name == "response_mask" else torch.where(on, x, garbage) for name, x in clean.items()}
    leaf = torch.where(on, given, garbage).requires_grad_()
    expected, (found, stats) = loss(given, clean), loss(leaf, dirty)
    found.sum().backward()
    assert torch.equal(found, expected[0])
    assert all(torch.equal(x, expected[1][name]) and x[~on].count_nonzero() == 0 for name, x in stats.items())
    assert not any(x.requires_grad for x in stats.values())
    assert found[~on].count_nonzero() == leaf.grad[~on].count_nonzero() == 0
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ratios_beyond_all_bounds_stay_finite(loss, sign):
    log_probs = torch.tensor([[1000.0, -1000.0], [1000.0, 0.0], [-1000.0, 0.0]], requires_grad=True)
    batch = {name: x if x.dtype is torch.bool else x.float() for name, x in batch_of([[sign, -sign]] * 3).items()}
    per_token, stats = loss(log_probs, batch)
    per_token.sum().backward()
    assert all(x.isfinite().all() for x in (per_token, log_probs.grad, *stats.values()))


@pytest.mark.parametrize("loss", [*LOSSES, *VALUE_LOSSES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (2, 0)])
def test_shapes_and_dtypes_are_kept(loss, dtype, shape):
    names = ("values", "returns") if is_of_values(loss) else ("old_log_probs", "advantages")
    batch = {names[0]: torch.zeros(shape, dtype=dtype), names[1]: torch.ones(shape, dtype=dtype)}
    batch["response_mask"] = torch.ones(shape, dtype=torch.bool)
    per_token, stats = loss(torch.zeros(shape, dtype=dtype), batch)
    assert {(x.shape, x.dtype) for x in (per_token, *stats.values())} == {(torch.Size(shape), dtype)}
