"""Numbers compared within groups of rows."""

import pytest
import torch

from verl.ops.masking import centred_in_groups, group_sums

X = torch.tensor([1.0, 5.0, 3.0, 8.0, 2.0], dtype=torch.float64)
GROUPS = torch.tensor([9, -2, 9, -2, 4])


def test_each_number_is_taken_less_the_weighted_mean_of_its_group():
    weights = torch.tensor([3, 1, 1, 0, 2])
    # Group 9: (3 * 1 + 1 * 3) / 4 = 1.5; the other two groups have one member with a weight.
    assert centred_in_groups(X, GROUPS, weights).tolist() == [-0.5, 0, 1.5, 0, 0]


def test_sums_are_over_the_group_of_each_row():
    assert group_sums(X, GROUPS).tolist() == [4, 13, 4, 13, 2]


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e6 + 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_numbers_differ_by_exactly_zero_under_any_weights(value, dtype):
    x = torch.full((6,), value, dtype=dtype)
    centred = centred_in_groups(x, torch.zeros(6, dtype=torch.int64), torch.tensor([3, 1, 4, 1, 5, 9]))
    assert centred.count_nonzero() == 0
    assert centred.dtype is dtype


def test_a_row_of_weight_zero_counts_nowhere_whatever_stands_there():
    x = torch.tensor([torch.nan, 1.0, 3.0])
    assert centred_in_groups(x, torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 1])).tolist() == [0, -1, 1]


def test_no_rows_give_no_numbers():
    none, groups = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert centred_in_groups(none, groups, none).shape == group_sums(none, groups).shape == (0,)
