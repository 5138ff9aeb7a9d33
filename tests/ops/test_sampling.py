"""Top-k, top-p and the inverse of the cumulative sum."""

import pytest
import torch
from refusals import refused

from verl.ops.sampling import filter_logits, first_with_mass, inverse_cdf, inverse_cdf_by_blocks

JUST_BELOW_1 = 1 - 2.0**-53


def kept(logits, **options):
    return [row.nonzero().squeeze(-1).tolist() for row in filter_logits(logits, **options) > -torch.inf]


def draw(probs, *u, dtype=torch.float64):
    rows = torch.tensor(probs, dtype=dtype).expand(len(u), -1)
    return inverse_cdf(rows, torch.tensor(u, dtype=torch.float64)).tolist()


def test_nothing_to_cut_returns_the_logits_themselves():
    logits = torch.randn(2, 5)
    assert filter_logits(logits) is logits
    assert filter_logits(logits, top_k=5) is logits
    assert filter_logits(logits, top_k=9) is logits


def test_what_is_kept_keeps_its_logit_and_dtype():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.bfloat16)
    cut = filter_logits(logits, top_k=2)
    assert cut.dtype is torch.bfloat16
    assert cut.tolist() == [[-torch.inf, 3, -torch.inf, 2]]


def test_top_k_keeps_the_k_largest_of_each_row():
    assert kept(torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 8.0, 7.0, 6.0]]), top_k=2) == [[1, 3], [0, 1]]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64).log()
    assert kept(logits, top_p=0.4) == [[1]]
    assert kept(logits, top_p=0.6) == [[1, 3]]
    assert kept(logits, top_p=0.8) == [[1, 2, 3]]
    assert kept(logits, top_p=0.95) == [[0, 1, 2, 3]]


def test_at_least_the_most_likely_token_is_kept():
    assert kept(torch.tensor([[0.0, 0.1, 0.0]]), top_p=1e-9) == [[1]]


def test_top_p_is_taken_of_the_mass_within_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    assert kept(logits, top_p=0.5) == [[0, 1]]
    # Within two, 0.4 is 4/7 of the mass.
    assert kept(logits, top_k=2, top_p=0.5) == [[0]]
    assert kept(logits, top_k=2, top_p=0.6) == [[0, 1]]


def test_ties_with_the_last_one_kept_are_kept_wherever_they_stand():
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.0], [2.0, 2.0, 1.0, 3.0]])
    assert kept(logits, top_k=2) == [[1, 2, 3], [0, 1, 3]]
    assert kept(torch.zeros(1, 4), top_p=0.3) == [[0, 1, 2, 3]]
    assert kept(logits, top_k=2, top_p=0.99) == [[1, 2, 3], [0, 1, 3]]


def test_forbidden_tokens_stay_forbidden():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0]])
    assert kept(logits, top_k=3) == [[1, 3]]
    assert kept(logits, top_p=0.99) == [[1, 3]]


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("vocabulary", [64, 5000])
def test_filters_agree_with_a_slow_row_by_row_definition(scale, vocabulary):
    logits = torch.randn(6, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
    for top_k, top_p in ((0, 0.9), (0, 0.999), (10, 0.7), (300, 0.95), (7, 1.0)):
        expected = []
        for row in logits:
            best = row.sort(descending=True).indices[: top_k or None]
            mass = torch.softmax(row[best], -1).cumsum(-1)
            count = int((mass < top_p).sum()) + 1
            expected.append(sorted(best[: count if top_p < 1 else None].tolist()))
        assert kept(logits, top_k=top_k, top_p=top_p) == expected


def test_a_row_is_filtered_the_same_alone_and_beside_flat_rows():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5000, generator=generator) * torch.tensor([[8.0], [0.0], [1.0], [3.0]])
    together = filter_logits(logits, top_p=0.9)
    for row in range(4):
        assert torch.equal(filter_logits(logits[row : row + 1], top_p=0.9)[0], together[row])


def without_mass(bad):
    return lambda: inverse_cdf(torch.tensor([[0.5], [bad], [0.5]]).expand(3, 4), torch.zeros(3, dtype=torch.float64))


test_impossible_filters_and_a_row_without_finite_mass_are_refused = refused(
    ("top_k", -1, lambda: filter_logits(torch.zeros(1, 3), top_k=-1)),
    ("top_p", 0.0, lambda: filter_logits(torch.zeros(1, 3), top_p=0.0)),
    *(("rows", [1], without_mass(bad)) for bad in (0.0, float("nan"), float("inf"))),
    kind=ValueError,
)


def test_the_first_index_whose_cumulative_sum_exceeds_u_is_drawn():
    assert draw([0.25, 0.5, 0.25], 0.0, 0.2499, 0.25, 0.7499, 0.75, JUST_BELOW_1) == [0, 0, 1, 1, 2, 2]


def test_probabilities_need_not_sum_to_one():
    assert draw([1.0, 2.0, 1.0], 0.0, 0.2499, 0.25, 0.7499, 0.75, JUST_BELOW_1) == [0, 0, 1, 1, 2, 2]
    assert draw([1e-30, 3e-30], 0.2499, 0.26) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_of_probability_zero_are_never_drawn(dtype):
    assert draw([0.0, 0.0, 0.3, 0.0, 0.7, 0.0], 0.0, 0.29, 0.31, JUST_BELOW_1, dtype=dtype) == [2, 2, 4, 4]


def test_u_just_below_one_never_falls_off_the_end():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(2000, 37, generator=generator).softmax(-1)
    probs[:, -5:] = 0
    drawn = inverse_cdf(probs, torch.full((2000,), JUST_BELOW_1, dtype=torch.float64))
    assert (drawn == 31).all()
    # Past any u in [0, 1), the last token with mass is still the answer.
    assert (inverse_cdf(probs, torch.ones(2000, dtype=torch.float64)) == 31).all()


def test_draws_over_evenly_spaced_u_have_the_given_frequencies():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.bincount(inverse_cdf(probs.expand(1000, -1), u), minlength=4).tolist() == [100, 0, 600, 300]


def test_a_large_vocabulary_is_drawn_like_by_hand():
    logits = torch.randn(8, 150_000, generator=torch.Generator().manual_seed(0)) * 4
    probs = filter_logits(logits, top_p=0.9).softmax(-1)
    u = torch.linspace(0, 0.999, 8, dtype=torch.float64)
    drawn = inverse_cdf(probs, u)
    cumulative = probs.double().cumsum(-1)
    for row, token in enumerate(drawn.tolist()):
        target = u[row] * cumulative[row, -1]
        assert probs[row, token] > 0
        assert cumulative[row, token] > target
        assert token == 0 or cumulative[row, token - 1] <= target


def test_a_row_is_drawn_the_same_alone_and_in_a_batch():
    probs = torch.rand(16, 100, generator=torch.Generator().manual_seed(0))
    u = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = inverse_cdf(probs, u)
    assert [inverse_cdf(probs[i : i + 1], u[i : i + 1]).item() for i in range(16)] == together.tolist()
    assert inverse_cdf(probs[:0], u[:0]).shape == (0,)


def test_a_sum_that_rounds_up_over_an_entry_of_probability_zero_does_not_let_it_win():
    probs = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64)
    as_a_parallel_sum_may_round = torch.tensor([[0.5, 0.5 + 2.0**-53, 1.0]], dtype=torch.float64)
    drawn = [first_with_mass(as_a_parallel_sum_may_round > u, probs > 0).item() for u in (0.0, 0.5)]
    assert drawn == [0, 2]


def test_both_ways_of_searching_agree():
    probs = torch.rand(500, 40, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    u = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sums = probs.cumsum(-1, dtype=torch.float64)
    by_scan = first_with_mass(sums > u[:, None] * sums[:, -1:], probs > 0)
    assert torch.equal(by_scan[:, 0], inverse_cdf(probs, u))


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 1024, 50_001])
def test_a_gpu_draws_by_blocks_what_a_cpu_draws_at_once(size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(64, size, generator=generator) * 4
    if size > 64:
        logits = filter_logits(logits, top_k=50)  # long stretches without mass
    probs, u = logits.softmax(-1), torch.rand(64, generator=generator, dtype=torch.float64)
    u[:3] = torch.tensor([0.0, JUST_BELOW_1, 0.5])
    assert inverse_cdf_by_blocks(probs, u).tolist() == inverse_cdf(probs, u).tolist()


def test_by_blocks_an_index_without_mass_is_never_drawn():
    probs = torch.zeros(4, 256)
    probs[:, 70], probs[:, 200] = 1.0, 1e-30
    u = torch.tensor([0.0, 0.5, JUST_BELOW_1, 1.0], dtype=torch.float64)
    found = inverse_cdf_by_blocks(probs, u)
    assert set(found.tolist()) <= {70, 200}
    assert found.tolist()[:2] == [70, 70]
