"""The order of the data: seeded, resumable from three numbers, and blind to the global random state."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from verl.data.sampler import DataSampler


def draw(sampler, count):
    return [sampler.next_batch().tolist() for _ in range(count)]


def rows_of(batches):
    return [row for batch in batches for row in batch]


def test_an_epoch_visits_each_row_at_most_once_and_all_of_them_when_batches_divide():
    rows = rows_of(draw(DataSampler(12, 4), 3))
    assert sorted(rows) == list(range(12))
    assert rows != list(range(12))


def test_the_remainder_is_left_out_and_differs_between_epochs():
    sampler = DataSampler(11, 4)
    assert sampler.batches_per_epoch == 2
    left_out = set()
    for _ in range(20):
        epoch = sampler.epoch
        rows = set(rows_of(draw(sampler, 2)))
        assert sampler.epoch == epoch + 1
        assert len(rows) == 8
        left_out.add(frozenset(range(11)) - rows)
    assert len(left_out) > 5


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.data(), st.integers(0, 3), st.integers(0, 40))
def test_a_sampler_that_loads_a_state_goes_on_as_the_saved_one(size, data, seed, drawn):
    batch_size = data.draw(st.integers(1, size))
    sampler = DataSampler(size, batch_size, seed)
    draw(sampler, drawn)
    resumed = DataSampler(size, batch_size, seed + 1)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.state_dict() == sampler.state_dict()
    assert draw(resumed, 5) == draw(sampler, 5)


def test_the_state_is_seed_epoch_and_position():
    sampler = DataSampler(10, 3, seed=5)
    draw(sampler, 2)
    assert sampler.state_dict() == {"seed": 5, "epoch": 0, "position": 6}
    draw(sampler, 1)
    assert sampler.state_dict() == {"seed": 5, "epoch": 1, "position": 0}


def test_the_global_random_state_neither_matters_nor_moves():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(DataSampler(20, 5), 6)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert draw(DataSampler(20, 5), 6) == first


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(rows) for seed in range(4) for rows in draw(DataSampler(20, 20, seed), 4)}
    assert len(orders) == 16


def test_a_batch_is_a_copy_that_may_be_changed():
    one, other = DataSampler(8, 4), DataSampler(8, 4)
    one.next_batch().zero_()
    one.load_state_dict({"seed": 0, "epoch": 0, "position": 0})
    assert draw(one, 1) == draw(other, 1)


def test_iteration_goes_on_over_epochs():
    assert [batch.tolist() for batch in islice(DataSampler(6, 3), 5)] == draw(DataSampler(6, 3), 5)


@pytest.mark.parametrize("batch_size", [0, -1, 11])
def test_a_batch_that_the_data_cannot_fill_is_refused(batch_size):
    with refusal("trainer.prompts_per_step"):
        DataSampler(10, batch_size, batch_size_name="trainer.prompts_per_step")


@pytest.mark.parametrize(
    "state",
    [
        {"seed": 0, "epoch": 0},
        {"seed": 0, "epoch": 0, "position": 1.5},
        {"seed": 0, "epoch": 0, "position": 0, "more": 1},
        {"seed": 0, "epoch": 0, "position": 11},
        {"seed": 0, "epoch": -1, "position": 0},
    ],
)
def test_a_state_of_other_data_or_another_form_is_refused(state):
    with refusal("state"):
        DataSampler(10, 5).load_state_dict(state)


def test_a_state_loads_under_another_batch_size():
    sampler = DataSampler(10, 2)
    draw(sampler, 3)
    larger = DataSampler(10, 5)
    larger.load_state_dict(sampler.state_dict())
    assert (larger.epoch, larger.position) == (1, 0)


# Batches that are filled from the next epoch


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.data(), st.integers(0, 3), st.integers(0, 40))
def test_filled_batches_visit_each_row_once_per_epoch_and_resume_exactly_anywhere(size, data, seed, drawn):
    batch_size = data.draw(st.integers(1, size))
    sampler = DataSampler(size, batch_size, seed, fills=True)
    rows = rows_of(draw(sampler, drawn))
    for epoch in range(len(rows) // size):
        assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert sampler.batches_of(3) == -(-3 * size // batch_size)
    resumed = DataSampler(size, batch_size, seed + 1)
    resumed.load_state_dict(sampler.state_dict())
    ahead = [sampler.peek(k).tolist() for k in range(4)]
    assert draw(resumed, 4) == ahead == draw(sampler, 4)


def test_a_state_of_an_earlier_version_goes_on_without_filling():
    earlier, filling = DataSampler(10, 6, seed=3), DataSampler(10, 6, seed=3, fills=True)
    draw(earlier, 1)
    filling.load_state_dict({"seed": 3, "epoch": 1, "position": 0})
    assert draw(filling, 4) == draw(earlier, 4)
    assert filling.state_dict() == earlier.state_dict()


def test_rows_that_divide_into_batches_come_in_the_order_of_earlier_versions():
    assert draw(DataSampler(12, 4, 1, fills=True), 7) == draw(DataSampler(12, 4, 1), 7)
