"""The clipped surrogate: each sign on each side, its gradient, dual clip, stats and masks."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.losses import PPOClip
from verl.errors import ConfigError


def batch_of(advantages, old_log_probs=None, mask=None):
    advantages = torch.tensor([advantages], dtype=torch.float64)
    return {
        "advantages": advantages,
        "old_log_probs": torch.zeros_like(advantages) if old_log_probs is None else old_log_probs,
        "response_mask": torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask,
    }


def log_probs_of(ratios):
    return torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        # The gradient of -A * ratio in log pi is -A * ratio; where the clip decides it is 0.
        (2.0, 1.1, -2.2, -2.2),
        (2.0, 1.5, -2.4, 0.0),
        (2.0, 0.5, -1.0, -1.0),
        (-2.0, 0.9, 1.8, 1.8),
        (-2.0, 0.5, 1.6, 0.0),
        (-2.0, 1.5, 3.0, 3.0),
    ],
)
def test_the_clip_acts_only_where_the_policy_has_moved_far_enough(advantage, ratio, loss, gradient):
    log_probs = log_probs_of([ratio])
    per_token, stats = PPOClip(clip_low=0.2, clip_high=0.2)(log_probs, batch_of([advantage]))
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss, abs=1e-14)
    assert log_probs.grad.item() == pytest.approx(gradient, abs=1e-14)
    assert stats["clip_fraction"].item() == (gradient == 0)


def test_the_two_bounds_are_separate():
    per_token, stats = PPOClip(clip_low=0.1, clip_high=0.4)(log_probs_of([1.5, 1.3, 0.8]), batch_of([1.0, 1.0, -1.0]))
    assert per_token[0].tolist() == pytest.approx([-1.4, -1.3, 0.9], abs=1e-14)
    assert stats["clip_fraction"].tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (-2.0, 2.9, 5.8, 5.8),  # below the bound: as without it
        (-2.0, 5.0, 6.0, 0.0),  # beyond it: 3 * 2
        (-2.0, 0.5, 1.6, 0.0),  # the low clip still acts
        (2.0, 5.0, -2.4, 0.0),  # positive advantages know only the high clip
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(advantage, ratio, loss, gradient):
    log_probs = log_probs_of([ratio])
    per_token, stats = PPOClip(dual_clip=3.0)(log_probs, batch_of([advantage]))
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss, abs=1e-13)
    assert log_probs.grad.item() == pytest.approx(gradient, abs=1e-13)
    assert stats["clip_fraction"].item() == (gradient == 0)


def test_at_the_old_policy_the_gradient_is_the_policy_gradient():
    log_probs, advantages = log_probs_of([1.0, 1.0, 1.0]), [3.0, -0.5, 0.0]
    per_token, stats = PPOClip()(log_probs, batch_of(advantages))
    per_token.sum().backward()
    assert log_probs.grad.tolist() == [[-3.0, 0.5, 0.0]]
    assert stats["ratio"].tolist() == [[1, 1, 1]]
    assert stats["clip_fraction"].count_nonzero() == 0
    assert stats["approx_kl"].count_nonzero() == 0


def test_approx_kl_is_k3_of_the_old_policy_against_the_new():
    _, stats = PPOClip()(log_probs_of([1.5]), batch_of([1.0]))
    assert stats["approx_kl"].item() == pytest.approx(1.5 - 1 - math.log(1.5), abs=1e-15)


def test_approx_kl_averages_to_the_exact_kl_of_old_to_new():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(1, 9, dtype=torch.float64, generator=generator).log_softmax(-1) for _ in range(2))
    _, stats = PPOClip()(new, batch_of([1.0] * 9, old_log_probs=old))
    exact = (old.exp() * (old - new)).sum().item()
    assert (old.exp() * stats["approx_kl"]).sum().item() == pytest.approx(exact, rel=1e-12)


def test_the_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(1, 30, dtype=torch.float64, generator=generator).requires_grad_()
    batch = batch_of(torch.randn(30, dtype=torch.float64, generator=generator).tolist())
    loss = PPOClip(clip_low=0.2, clip_high=0.3, dual_clip=2.0)
    assert torch.autograd.gradcheck(lambda x: loss(x, batch)[0], log_probs)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e9])
def test_what_stands_off_the_mask_has_no_loss_gradient_or_stats(garbage):
    mask = torch.tensor([[True, False, True]])
    log_probs = torch.tensor([[0.1, garbage, -0.3]], dtype=torch.float64, requires_grad=True)
    batch = batch_of([1.0, garbage, -1.0], mask=mask)
    per_token, stats = PPOClip(dual_clip=3.0)(log_probs, batch)
    per_token.sum().backward()
    assert per_token[0, 1] == 0
    assert log_probs.grad[0, 1] == 0
    assert log_probs.grad.isfinite().all()
    for stat in stats.values():
        assert stat.shape == (1, 3)
        assert stat[0, 1] == 0
        assert stat.isfinite().all()
        assert not stat.requires_grad


@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_ratio_makes_the_loss_or_its_gradient_infinite(log_ratio, advantage):
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    batch = {name: tensor.float() for name, tensor in batch_of([advantage]).items()}
    batch["response_mask"] = batch["response_mask"].bool()
    per_token, stats = PPOClip()(log_probs, batch)
    per_token.sum().backward()
    assert per_token.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert stats["approx_kl"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (2, 0)])
def test_shapes_and_dtypes_are_kept(dtype, shape):
    batch = {"advantages": torch.ones(shape, dtype=dtype), "old_log_probs": torch.zeros(shape, dtype=dtype)}
    batch["response_mask"] = torch.ones(shape, dtype=torch.bool)
    per_token, stats = PPOClip(dual_clip=2.0)(torch.zeros(shape, dtype=dtype), batch)
    for tensor in (per_token, *stats.values()):
        assert tensor.shape == shape
        assert tensor.dtype is dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_low": 1.2}, "clip_low is 1.2: must lie in"),
        ({"clip_high": -0.1}, "clip_high is -0.1: must not be negative"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0: must be above 1, or null"),
    ],
)
def test_bounds_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PPOClip(**arguments)
