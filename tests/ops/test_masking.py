"""Sums, means and whitening over a mask."""

import pytest
import torch

from verl.ops.masking import last_true, masked_mean, masked_sum, masked_whiten

X = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [False, False, False]])


def test_sums_and_means_count_only_what_is_on_the_mask():
    assert masked_sum(X, MASK) == 5
    assert masked_mean(X, MASK) == 2.5
    assert masked_sum(X, MASK, dim=-1).tolist() == [5, 0]
    assert masked_mean(X, MASK, dim=0).tolist() == [1, 0, 4]


def test_an_empty_mask_gives_zero_not_nan():
    empty = torch.zeros_like(MASK)
    assert masked_mean(X, empty) == 0
    assert masked_mean(X, MASK, dim=-1).tolist() == [2.5, 0]
    assert masked_whiten(X, empty).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_no_rows_give_empty_results():
    none, mask = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
    assert masked_mean(none, mask) == 0
    assert masked_whiten(none, mask).shape == (0, 3)
    assert last_true(mask).shape == (0,)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_what_stands_off_the_mask_changes_nothing(garbage):
    dirty = torch.where(MASK, X, garbage).requires_grad_()
    assert masked_sum(dirty, MASK) == 5
    assert torch.equal(masked_mean(dirty, MASK, dim=-1), masked_mean(X, MASK, dim=-1))
    assert torch.equal(masked_whiten(dirty, MASK), masked_whiten(X, MASK))
    masked_mean(dirty, MASK).backward()
    assert dirty.grad.tolist() == [[0.5, 0, 0.5], [0, 0, 0]]


def test_whitening_gives_mean_zero_and_variance_one_dividing_by_n():
    x, mask = torch.tensor([[1.0, 3.0, 99.0]], dtype=torch.float64), torch.tensor([[True, True, False]])
    assert torch.allclose(masked_whiten(x, mask), torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64), atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, -1 / 3, 12345.678])
def test_whitening_equal_entries_gives_exact_zeros_in_their_dtype(dtype, value):
    whitened = masked_whiten(torch.full((7, 3), value, dtype=dtype), torch.ones(7, 3, dtype=torch.bool))
    assert whitened.dtype is dtype
    assert whitened.count_nonzero() == 0


def test_whitening_a_single_entry_gives_zero():
    assert masked_whiten(X, torch.tensor([[False, True, False], [False, False, False]])).count_nonzero() == 0


def test_last_true_is_the_index_of_the_last_true_or_minus_one():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    assert last_true(mask).tolist() == [2, -1, 3]
    assert last_true(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]
