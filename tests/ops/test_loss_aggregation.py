"""One scalar out of losses per token, the same however the batch is cut."""

import pytest
import torch
from refusals import refused

from verl.ops.masking import AGGREGATIONS, LossTotals, aggregate

LOSSES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])


def aggregated(losses, mask, mode, totals):
    return aggregate(losses, mask, mode, totals, norm_length=8 if mode == "seq-mean-token-sum-norm" else None)


def random_batch(rows=17, length=9):
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(rows, length, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < torch.rand(rows, 1, generator=generator)
    mask[3] = False
    return losses, mask


def test_totals_count_tokens_and_rows_that_have_any():
    assert LossTotals.of(MASK) == LossTotals(tokens=3, sequences=2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 3 + 8) / 3),
        ("seq-mean-token-mean", ((1 + 3) / 2 + 8) / 2),
        ("seq-mean-token-sum", (1 + 3 + 8) / 2),
        ("seq-mean-token-sum-norm", (1 + 3 + 8) / 2 / 8),
    ],
)
def test_hand_computed_values_of_each_mode(mode, expected):
    assert aggregated(LOSSES, MASK, mode, LossTotals.of(MASK)).item() == expected


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(10))
def test_any_split_into_micro_batches_sums_to_the_whole(mode, seed):
    losses, mask = random_batch()
    losses.requires_grad_()
    totals = LossTotals.of(mask)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(losses), generator=generator)
    cuts = torch.randint(1, 6, (len(losses),), generator=generator).cumsum(0)
    pieces = [piece for piece in rows.tensor_split(cuts[cuts < len(losses)]) if len(piece)]
    assert len(pieces) > 2
    whole = aggregated(losses, mask, mode, totals)
    parts = sum(aggregated(losses[piece], mask[piece], mode, totals) for piece in pieces)
    assert abs(whole.item() - parts.item()) < 1e-12
    of_whole, of_parts = torch.autograd.grad(whole, losses), torch.autograd.grad(parts, losses)
    assert torch.allclose(of_whole[0], of_parts[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_neither_its_width_nor_its_content_counts(mode):
    losses, mask = random_batch()
    wider = torch.nn.functional.pad(torch.where(mask, losses, torch.nan), (0, 5), value=torch.nan)
    wider_mask = torch.nn.functional.pad(mask, (0, 5))
    expected = aggregated(losses, mask, mode, LossTotals.of(mask)).item()
    assert aggregated(wider, wider_mask, mode, LossTotals.of(wider_mask)).item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_on_the_mask_gives_zero_with_zero_gradient(mode, rows):
    losses, mask = torch.ones(rows, 3, requires_grad=True), torch.zeros(rows, 3, dtype=torch.bool)
    loss = aggregated(losses, mask, mode, LossTotals.of(mask))
    loss.backward()
    assert loss.item() == 0
    assert losses.grad.count_nonzero() == 0


NORMED = "seq-mean-token-sum-norm"
test_an_unknown_mode_and_a_length_not_above_zero_are_refused = refused(
    ("aggregation", "mean", lambda: aggregate(LOSSES, MASK, "mean", LossTotals.of(MASK))),
    ("norm_length", None, lambda: aggregate(LOSSES, MASK, NORMED, LossTotals.of(MASK), None)),
    ("norm_length", 0.0, lambda: aggregate(LOSSES, MASK, NORMED, LossTotals.of(MASK), 0.0)),
    ("norm_length", -3.0, lambda: aggregate(LOSSES, MASK, NORMED, LossTotals.of(MASK), -3.0)),
    kind=ValueError,
)
