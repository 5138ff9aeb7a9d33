"""Counter-based uniforms: the numbers themselves, that they look random, and that only the counters matter."""

import pytest
import torch

from verl.ops.sampling import EVALUATION, TRAINING, uniform


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def one(seed=0, step=0, prompt=0, sample=0, position=0, stream=TRAINING):
    return uniform(seed, step, ids(prompt), ids(sample), position, stream).item()


def by_definition(*counters):
    """The scheme of the module with Python's unbounded integers."""
    word, state = 2**64, 0
    for counter in counters:
        state ^= 0x9E3779B97F4A7C15 * (counter + 1) % word
        state = (state ^ state // 2**30) * 0xBF58476D1CE4E5B9 % word
        state = (state ^ state // 2**27) * 0x94D049BB133111EB % word
        state ^= state // 2**31
    return state // 2**11 / 2**53


@pytest.mark.parametrize(
    ("counters", "golden"),
    [
        ({}, "0x1.c4ebc3e101266p-1"),
        ({"position": 1}, "0x1.af0f9955dfc18p-2"),
        ({"prompt": 1, "position": 1}, "0x1.272c1b54911c8p-1"),
        ({"sample": 1}, "0x1.1322af7d2a24ap-1"),
        ({"seed": 1}, "0x1.b0bf31ed65c08p-2"),
        ({"step": 1}, "0x1.2a2acdfde98b6p-2"),
        ({"stream": EVALUATION}, "0x1.9ee31ae7724eep-2"),
        ({"seed": -1, "step": 2**40, "prompt": -1, "sample": 2**62, "position": 63}, "0x1.971f733d8f670p-4"),
    ],
)
def test_the_numbers_are_these_for_ever(counters, golden):
    assert one(**counters).hex() == golden


def test_tensors_wrap_exactly_like_unbounded_integers():
    extremes = [0, 1, 2**31, 2**32 + 5, 2**63 - 1, -1, -(2**63)]
    found = uniform(2**63, 7, ids(*extremes)[:, None], ids(*extremes), 3)
    for row, prompt in enumerate(extremes):
        for column, sample in enumerate(extremes):
            assert found[row, column].item() == by_definition(2**63, 0, 7, prompt, sample, 3)


def test_a_row_has_the_same_noise_alone_in_a_batch_and_for_all_positions_at_once():
    prompts, samples, positions = torch.arange(12) // 3, torch.arange(12) % 3, torch.arange(20)
    whole = uniform(5, 9, prompts[:, None], samples[:, None], positions)
    assert whole.shape == (12, 20)
    assert whole.dtype is torch.float64
    for t in (0, 7, 19):
        assert torch.equal(uniform(5, 9, prompts, samples, t), whole[:, t])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    own_positions = torch.arange(12) + 2
    shuffled = uniform(5, 9, prompts[order], samples[order], own_positions[order])
    assert torch.equal(shuffled, whole[torch.arange(12), own_positions][order])
    assert one(5, 9, prompt=3, sample=2, position=4) == whole[11, 4]


def test_no_rows_have_no_noise():
    assert uniform(0, 0, ids(), ids(), 3).shape == (0,)


def test_numbers_lie_in_the_half_open_unit_interval_and_use_53_bits():
    numbers = uniform(0, 0, torch.arange(500)[:, None], ids(0), torch.arange(200)).flatten()
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert len(numbers.unique()) == len(numbers)
    assert (numbers * 2**53 % 2 == 1).any()


@pytest.mark.first_rows(2)
@pytest.mark.parametrize("axis", ["seed", "stream", "step", "prompt", "sample", "position"])
def test_numbers_along_each_counter_are_uniform_and_uncorrelated(axis):
    count, bins = 8192, 64
    along = torch.arange(count)
    if axis in ("prompt", "sample", "position"):
        counters = {"prompt": ids(3), "sample": ids(1), "position": ids(2)} | {axis: along}
        numbers = uniform(0, 0, counters["prompt"], counters["sample"], counters["position"])
    else:
        numbers = torch.tensor([one(**{axis: n}) for n in range(2048)], dtype=torch.float64)
        count = len(numbers)
    observed = torch.histc(numbers, bins, 0, 1)
    chi2 = ((observed - count / bins).square() / (count / bins)).sum().item()
    # 63 degrees of freedom: mean 63, deviation 11.2; the numbers are fixed, so this never flickers.
    assert 63 - 4 * 11.2 < chi2 < 63 + 4 * 11.2
    for lag in (1, 2, 16):
        pairs = torch.stack([numbers[:-lag], numbers[lag:]])
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 4 / count**0.5


def test_flipping_any_bit_of_a_counter_flips_half_of_the_bits_of_the_number():
    base = uniform(0, 0, torch.arange(256), ids(0), 0)
    for bit in range(63):
        flipped = uniform(0, 0, torch.arange(256) ^ (1 << bit), ids(0), 0)
        changed = (base * 2**53).to(torch.int64) ^ (flipped * 2**53).to(torch.int64)
        share = sum(((changed >> k) & 1).sum().item() for k in range(53)) / (53 * 256)
        assert 0.47 < share < 0.53


def test_swapped_counters_give_other_numbers():
    assert len({one(prompt=1), one(sample=1), one(position=1), one(step=1), one(seed=1), one(stream=1)}) == 6
