"""GSPO's ratio of a whole response and CISPO's weight without gradient, against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from refusals import refusal

from verl.algorithms.losses import CISPO, GSPO, PPOClip

LOSSES = [GSPO(clip_low=0.2, clip_high=0.3), CISPO()]


def batch_of(advantages, mask=None, old=0.0):
    advantages = torch.tensor(advantages, dtype=torch.float64)
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return {"advantages": advantages, "old_log_probs": torch.full_like(advantages, old), "response_mask": mask}


def log_probs_of(ratios):
    return torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()


def test_the_ratio_of_a_response_is_the_geometric_mean_of_its_tokens():
    log_probs, batch = log_probs_of([[1.1, 1.21, 50.0]]), batch_of([[2.0, 2.0, 2.0]], mask=[[1, 1, 0]])
    per_token, stats = GSPO(clip_low=0.2, clip_high=0.3)(log_probs, batch)
    per_token.sum().backward()
    ratio = math.sqrt(1.1 * 1.21)
    assert per_token.tolist() == [pytest.approx([-2 * ratio, -2 * ratio, 0], abs=1e-14)]
    # Through its own token, each of the two has slope ratio * A, as the mean over tokens of eq. 5 has.
    assert log_probs.grad.tolist() == [pytest.approx([-2 * ratio, -2 * ratio, 0], abs=1e-14)]
    assert stats["ratio"].tolist() == [pytest.approx([ratio, ratio, 0], abs=1e-14)]


@pytest.mark.parametrize(
    ("advantage", "ratios", "loss", "is_clipped"),
    [
        (2.0, [1.5, 1.5], -2.6, True),
        (2.0, [2.0, 0.5], -2.0, False),  # the mean of the logarithms is 0
        (-2.0, [0.5, 0.5], 1.6, True),
        (-2.0, [1.5, 1.5], 3.0, False),
    ],
)
def test_a_response_is_clipped_as_a_whole(advantage, ratios, loss, is_clipped):
    log_probs = log_probs_of([ratios])
    per_token, stats = GSPO(clip_low=0.2, clip_high=0.3)(log_probs, batch_of([[advantage] * 2]))
    per_token.sum().backward()
    assert per_token.tolist() == [pytest.approx([loss, loss], abs=1e-14)]
    assert stats["clip_fraction"].tolist() == [[is_clipped, is_clipped]]
    assert (log_probs.grad.count_nonzero() == 0) == is_clipped


def test_the_gradient_of_a_response_is_that_of_its_scalar_objective():
    log_probs = log_probs_of([[1.1, 0.8, 1.3]])
    per_token, _ = GSPO(clip_low=0.9, clip_high=0.9)(log_probs, batch_of([[1.5] * 3]))
    (found,) = torch.autograd.grad(per_token.mean(), log_probs)
    (expected,) = torch.autograd.grad(-1.5 * log_probs.mean(dim=-1).exp().sum(), log_probs)
    assert torch.allclose(found, expected, rtol=0, atol=1e-15)


def test_a_response_of_one_token_has_the_loss_of_ppo():
    batch, log_probs = batch_of([[2.0], [-1.0], [1.0]]), log_probs_of([[1.5], [0.4], [0.9]])
    found, _ = GSPO(clip_low=0.2, clip_high=0.3)(log_probs, batch)
    expected, _ = PPOClip(clip_low=0.2, clip_high=0.3)(log_probs, batch)
    assert torch.allclose(found, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("ratio", "weight"),
    [(1.0, 1.0), (1.4, 1.4), (9.0, 1.5), (0.2, 0.6)],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_weight_is_clipped_and_the_gradient_flows_on(ratio, weight, advantage):
    log_probs = log_probs_of([[ratio]])
    per_token, stats = CISPO(clip_low=0.4, clip_high=0.5)(log_probs, batch_of([[advantage]]))
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(-weight * advantage * math.log(ratio), abs=1e-14)
    assert log_probs.grad.item() == pytest.approx(-weight * advantage, abs=1e-14)
    assert stats["clip_fraction"].item() == (weight != ratio)
    assert stats["ratio"].item() == pytest.approx(ratio)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(loss):
    log_probs = torch.full((1, 3), -1.5, dtype=torch.float64, requires_grad=True)
    per_token, stats = loss(log_probs, batch_of([[3.0, 3.0, 3.0]], old=-1.5))
    per_token.sum().backward()
    assert torch.allclose(log_probs.grad, torch.full((1, 3), -3.0, dtype=torch.float64), rtol=0, atol=1e-15)
    assert stats["clip_fraction"].count_nonzero() == stats["approx_kl"].count_nonzero() == 0


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_what_stands_off_the_mask_changes_nothing(loss, garbage):
    mask = [[1, 0, 1], [0, 0, 0]]
    clean = batch_of([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]], mask)
    log_probs = torch.tensor([[0.1, 0.0, -0.2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    on = clean["response_mask"]
    dirty = {name: x if name == "response_mask" else torch.where(on, x, garbage) for name, x in clean.items()}
    leaf = torch.where(on, log_probs, garbage).requires_grad_()
    expected, (found, stats) = loss(log_probs, clean), loss(leaf, dirty)
    found.sum().backward()
    assert torch.equal(found, expected[0])
    assert all(torch.equal(x, expected[1][name]) and x[~on].count_nonzero() == 0 for name, x in stats.items())
    assert found[~on].count_nonzero() == leaf.grad[~on].count_nonzero() == 0


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_ratios_beyond_all_bounds_stay_finite(loss):
    log_probs = torch.tensor([[900.0, -900.0]], dtype=torch.float32, requires_grad=True)
    batch = {name: x if x.dtype is torch.bool else x.float() for name, x in batch_of([[1.0, -1.0]]).items()}
    per_token, stats = loss(log_probs, batch)
    per_token.sum().backward()
    assert all(x.isfinite().all() for x in (per_token, log_probs.grad, *stats.values()))


@pytest.mark.parametrize("kind", [GSPO, CISPO])
def test_bounds_out_of_range_are_refused(kind):
    with refusal("clip_low"):
        kind(clip_low=1.5)
    with refusal("clip_high"):
        kind(clip_high=-0.1)
