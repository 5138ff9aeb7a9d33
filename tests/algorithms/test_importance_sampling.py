"""Truncated importance sampling: weights by hand, at each level and in each mode."""

import math

import pytest
import torch

from verl.algorithms.importance_sampling import TruncatedIS, weight_advantages
from verl.protocol import DataProto


def batch_of(ratios, mask=None):
    """Old log-probs whose ratio to those of the rollout is as given."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    rollout = torch.full_like(ratios, -2.0)
    return DataProto.from_dict(
        {"rollout_log_probs": rollout, "old_log_probs": rollout + ratios.log(), "response_mask": mask}
    )


RATIOS, MASK = [[0.5, 3.0, 9.0], [1.5, 2.0, 0.1]], [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TruncatedIS(cap=2.0), [[0.5, 2.0, 0.0], [1.5, 2.0, 0.1]]),
        (TruncatedIS(mode="mask", cap=2.0, floor=0.3), [[0.5, 0.0, 0.0], [1.5, 2.0, 0.0]]),
        # Products over the responses: 1.5 and 0.3.
        (TruncatedIS(level="sequence", cap=1.2), [[1.2, 1.2, 0.0], [0.3, 0.3, 0.3]]),
        (TruncatedIS(level="sequence", mode="mask", cap=2.0, floor=0.4), [[1.5, 1.5, 0.0], [0.0, 0.0, 0.0]]),
    ],
    ids=str,
)
def test_weights_of_each_level_and_mode(correction, expected):
    weights, _ = correction(batch_of(RATIOS, MASK))
    # 2.0 stands on the cap: to rounding it may fall on either side only where the result is the same.
    close = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(weights, close, rtol=0, atol=1e-12)


def test_metrics_speak_of_the_weights_before_the_cut():
    _, metrics = TruncatedIS(cap=1.6)(batch_of([[0.5, 3.0, 9.0], [1.5, 2.0, 1.0]], MASK))
    assert metrics == {
        "importance/weight_mean": pytest.approx((0.5 + 3 + 1.5 + 2 + 1) / 5),
        "importance/weight_max": pytest.approx(3.0),
        "importance/effective_share": pytest.approx(8**2 / (5 * (0.25 + 9 + 2.25 + 4 + 1))),
        "importance/cut_share": pytest.approx(2 / 5),
    }


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_an_engine_that_agrees_with_the_trainer_has_weights_of_exactly_one(level, mode):
    weights, metrics = TruncatedIS(level=level, mode=mode, cap=1.0)(batch_of([[1.0] * 3] * 2, MASK))
    assert weights.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert metrics["importance/cut_share"] == 0
    assert metrics["importance/effective_share"] == 1


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_what_stands_off_the_mask_changes_nothing(level, garbage):
    clean = batch_of(RATIOS, MASK)
    mask = clean["response_mask"]
    dirty = DataProto.from_dict(
        {name: x if name == "response_mask" else torch.where(mask, x, garbage) for name, x in clean.batch.items()}
    )
    correction = TruncatedIS(level=level)
    expected, found = correction(clean), correction(dirty)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_far_apart_log_probs_stay_finite_and_no_rows_give_zero_metrics():
    mask = torch.ones(1, 2, dtype=torch.bool)
    far = DataProto.from_dict(
        {
            "rollout_log_probs": torch.tensor([[-900.0, 0.0]]),
            "old_log_probs": torch.tensor([[0.0, -900.0]]),
            "response_mask": mask,
        }
    )
    weights, metrics = TruncatedIS()(far)
    assert weights.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert set(TruncatedIS()(far[:0])[1].values()) == {0.0}


def test_advantages_are_weighed_and_returns_are_not():
    credit = DataProto.from_dict({"advantages": torch.tensor([[1.0, -2.0]]), "returns": torch.tensor([[3.0, 4.0]])})
    found = weight_advantages(credit, torch.tensor([[0.5, 0.0]], dtype=torch.float64))
    assert found["advantages"].tolist() == [[0.5, 0.0]]
    assert found["returns"].tolist() == [[3.0, 4.0]]
    assert found["advantages"].dtype is torch.float32
