"""The clipped value loss; what it has in common with those of the policy is in `test_policy_losses.py`."""

import pytest
import torch

from verl.algorithms.losses import ClippedValueLoss


def batch_of(old_values, returns):
    old_values, returns = (torch.tensor([x], dtype=torch.float64) for x in (old_values, returns))
    return {"values": old_values, "returns": returns, "response_mask": torch.ones_like(returns, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        # Old value 0, return 1, clip 0.2.
        (0.1, 0.5 * 0.9**2, -0.9),  # within the clip: the squared error
        (0.6, 0.5 * 0.8**2, 0.0),  # moved too far towards the return: held at 0.2
        (-0.6, 0.5 * 1.6**2, -1.6),  # moved away: the true error is the worse one
        (2.0, 0.5 * 1.0**2, 1.0),  # far beyond the return: the true error is the worse one
    ],
)
def test_the_worse_of_the_true_and_the_held_error_counts(value, loss, gradient):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    per_token, stats = ClippedValueLoss(clip=0.2)(values, batch_of([0.0], [1.0]))
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss, abs=1e-14)
    assert values.grad.item() == pytest.approx(gradient, abs=1e-14)
    assert stats["clip_fraction"].item() == (gradient == 0)
    assert stats["error"].item() == pytest.approx(value - 1.0)


def test_without_clip_it_is_half_the_squared_error():
    values = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    per_token, stats = ClippedValueLoss(clip=None)(values, batch_of([0.0, 0.0], [1.0, 1.0]))
    assert per_token.tolist() == [[2.0, 2.0]]
    assert stats["error"].tolist() == [[2.0, -2.0]]
    assert stats["clip_fraction"].tolist() == [[0.0, 0.0]]


def test_a_value_that_moved_less_than_the_clip_is_never_counted_as_clipped():
    """Old + (new - old) may come out above new by rounding, which clips nothing."""
    old = torch.linspace(-1, 1, 1000)[None]
    new = old + 0.1 * torch.linspace(-1, 1, 1000).sin()
    mask = torch.ones_like(old, dtype=torch.bool)
    batch = {"values": old, "returns": torch.zeros_like(old), "response_mask": mask}
    assert ClippedValueLoss(clip=0.2)(new, batch)[1]["clip_fraction"].sum() == 0
