"""Micro-batches within a token budget, and rows divided evenly."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from verl.ops.batching import balance, micro_batches

lengths = st.lists(st.integers(0, 50), max_size=40)


def as_lists(parts):
    assert all(part.dtype is torch.int64 and part.dim() == 1 for part in parts)
    return [part.tolist() for part in parts]


@pytest.mark.parametrize(
    ("cut", "lengths", "limit", "expected"),
    [
        # Longest first: rows 2 (7), 0 (4), 3 (4), 1 (2), 4 (1). 2 * 7 > 12; 3 * 4 = 12; 1 more would be 16.
        (micro_batches, [4, 2, 7, 4, 1], 12, [[2], [0, 3, 1], [4]]),
        (micro_batches, [3] * 5, 6, [[0, 1], [2, 3], [4]]),  # of equal length: their order
        (micro_batches, [9, 1, 1], 2, [[0], [1, 2]]),  # over the budget: alone
        (micro_batches, [], 10, []),
        # Dealt 9, 7 then 6, 4 the other way round: {9, 4} and {7, 6}.
        (balance, [4, 9, 7, 6], 2, [[0, 1], [2, 3]]),
        (balance, [5, 3], 4, [[0], [1], [], []]),
        (balance, [], 2, [[], []]),
    ],
)
def test_worked_examples_of_lengths_in_a_list_or_a_tensor(cut, lengths, limit, expected):
    assert as_lists(cut(lengths, limit)) == as_lists(cut(torch.tensor(lengths, dtype=torch.int64), limit)) == expected


@given(lengths, st.integers(1, 120))
@settings(max_examples=100, deadline=None)
def test_micro_batches_hold_every_row_once_and_keep_the_budget(sizes, budget):
    batches = as_lists(micro_batches(sizes, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(sizes)))
    for batch in batches:
        longest = max(sizes[row] for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
    for batch, following in pairwise(batches):
        # None is cut early: the next row would have broken the budget.
        assert (len(batch) + 1) * sizes[batch[0]] > budget
        assert min(sizes[row] for row in batch) >= max(sizes[row] for row in following)


@given(lengths, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_balance_divides_rows_evenly_in_count_and_in_length(sizes, parts):
    bins = as_lists(balance(sizes, parts))
    assert len(bins) == parts
    assert sorted(row for part in bins for row in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in bins)
    counts = [len(part) for part in bins]
    assert max(counts) - min(counts) <= 1
    totals = [sum(sizes[row] for row in part) for part in bins]
    assert max(totals) - min(totals) <= max(sizes, default=0)


test_budgets_and_parts_below_one_are_refused = refused(
    ("token_budget", 0, lambda: micro_batches([1], 0)), ("parts", 0, lambda: balance([1], 0)), kind=ValueError
)
