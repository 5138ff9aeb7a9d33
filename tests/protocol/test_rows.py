"""Rows of a batch: chosen, put in order, divided, joined and re-padded."""

import io
import pickle

import numpy as np
import torch
from batches import assert_same, batches, rollout
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal, refused

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto


@given(batches(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_batch_is_made_again_of_its_chunks_and_its_reordered_rows(data, k, random):
    chunks = data.chunk(k)
    sizes = [len(part) for part in chunks]
    assert len(chunks) == k
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    order = random.sample(range(len(data)), len(data))
    inverse = np.argsort(np.array(order, dtype=np.int64))
    for again in (DataProto.concat(chunks), data[order][inverse]):
        assert_same(again, data)
    assert data[order]["answer"].tolist() == [data["answer"][row] for row in order]


@given(batches(), st.integers(0, 3))
def test_repeat_agrees_with_an_index(data, n):
    assert_same(data.repeat(n), data[[row for row in range(len(data)) for _ in range(n)]])


@given(st.lists(batches(), min_size=1, max_size=4))
def test_joining_batches_of_other_lengths_moves_every_token_and_adds_padding_alone(parts):
    joined = DataProto.concat(parts).check(strict=True)
    filled = [part for part in parts if len(part)] or parts[:1]
    longest_p = max(part["prompts"].shape[1] for part in filled)
    longest_t = max(part["responses"].shape[1] for part in filled)
    assert joined["input_ids"].shape == (sum(map(len, parts)), longest_p + longest_t)
    first = 0
    for part in filled:
        (p, t), rows = (part["prompts"].shape[1], part["responses"].shape[1]), joined[first : first + len(part)]
        first += len(part)
        kept = {"P": slice(longest_p - p, None), "T": slice(0, t), "S": slice(longest_p - p, longest_p + t)}
        for letter, names in {
            "P": ("prompts", "prompt_mask"),
            "T": ("responses", "values"),
            "S": ("input_ids", "attention_mask"),
        }.items():
            for name in names:
                assert torch.equal(rows[name][:, kept[letter]], part[name])
                assert rows[name].count_nonzero() == part[name].count_nonzero()
        assert torch.equal(rows["hidden"], part["hidden"])
        assert rows["answer"].tolist() == part["answer"].tolist()


@given(batches(), st.data())
def test_every_kind_of_index_agrees_with_torchs_own(data, draw):
    rows = len(data)
    chosen = draw.draw(st.lists(st.integers(-rows, rows - 1), max_size=8)) if rows else []
    mask = draw.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    bounds = st.none() | st.integers(-9, 9)
    piece = slice(draw.draw(bounds), draw.draw(bounds), draw.draw(st.none() | st.sampled_from([1, 2, 3, -1, -2])))
    numbers = data["prompt_ids"].numpy()
    for key, expected in [
        (chosen, numbers[np.array(chosen, dtype=np.int64)]),
        (np.array(chosen, dtype=np.int64), numbers[np.array(chosen, dtype=np.int64)]),
        (torch.tensor(chosen, dtype=torch.int64), numbers[np.array(chosen, dtype=np.int64)]),
        (torch.tensor(mask, dtype=torch.bool), numbers[np.array(mask, dtype=bool)]),
        (piece, numbers[piece]),
    ]:
        part = data[key].check()
        assert part["prompt_ids"].tolist() == expected.tolist()
        assert len(part) == len(part["answer"]) == len(expected)


def test_added_places_hold_each_fields_own_padding():
    short = DataProto.from_dict({"labels": torch.ones(1, 2).long(), "loss_mask": torch.ones(1, 2).bool()})
    long = DataProto.from_dict({"labels": torch.ones(1, 4).long(), "loss_mask": torch.ones(1, 4).bool()})
    joined = DataProto.concat([short, long])
    assert joined["labels"].tolist() == [[1, 1, -100, -100], [1, 1, 1, 1]]
    assert joined["loss_mask"].tolist()[0] == [True, True, False, False]
    parts = [DataProto.from_dict({"prompts": torch.full((1, p), 5)}, meta_info={"pad_token_id": 7}) for p in (1, 3)]
    assert DataProto.concat(parts)["prompts"].tolist() == [[7, 7, 5], [5, 5, 5]]


def test_rows_of_episodes_are_repadded_to_the_most_and_to_the_longest_context():
    def part(lines):
        contexts = torch.tensor([lines])
        return DataProto.from_dict({"contexts": contexts, "prompts": torch.full((1, contexts.shape[2]), 9)})

    joined = DataProto.concat([part([[5, 6, 7]]), part([[1, 2], [-1, 3]])])
    assert joined["contexts"].tolist() == [[[5, 6, 7], [-1, -1, -1]], [[-1, 1, 2], [-1, -1, 3]]]


def test_s_is_repadded_even_where_its_length_happens_to_agree():
    def part(p, t):
        return DataProto.from_dict(
            {
                "prompts": torch.ones(1, p).long(),
                "responses": torch.full((1, t), 2),
                "input_ids": torch.tensor([[1] * p + [2] * t]),
            }
        )

    assert DataProto.concat([part(1, 2), part(2, 1)])["input_ids"].tolist() == [[0, 1, 2, 2], [1, 1, 2, 0]]


def joined(*parts):
    return lambda: DataProto.concat([DataProto.from_dict({"hidden": part}) for part in parts])


HALF = torch.zeros(2, 3)
test_parts_that_cannot_be_joined_are_refused_by_field = refused(
    ((), "concat", joined()),
    ("attention_mask", "missing", lambda: DataProto.concat([rollout(), rollout().select(["prompts"])])),
    ("hidden", [2, 4], joined(HALF, torch.zeros(2, 4))),
    ("hidden", "float64", joined(HALF, HALF.double())),
    kind=DataProtoValidationError,
)


def test_parts_without_rows_need_no_fields():
    data = rollout()
    assert_same(DataProto.concat([DataProto(), data, data[:0]]), data)
    assert len(DataProto.concat([DataProto(), DataProto()])) == 0


def test_gradients_pass_through_indexing_and_joining():
    leaf = torch.zeros(2, 2, requires_grad=True)
    data = DataProto.from_dict({"log_probs": leaf * 1.0})
    joined = DataProto.concat([data[[1]], DataProto.from_dict({"log_probs": torch.zeros(1, 3)}), data.repeat(2)])
    joined["log_probs"].sum().backward()
    assert leaf.grad.tolist() == [[2.0, 2.0], [3.0, 3.0]]


def test_fewer_than_one_chunk_is_refused():
    with refusal(kind=DataProtoValidationError):
        rollout().chunk(0)


def test_zero_rows_pass_through_everything():
    empty = rollout(3)[:0]
    assert len(empty) == 0
    assert bool(empty)
    assert empty.check(strict=True) is empty
    assert len(empty.repeat(3)) == 0
    assert len(empty[[]]) == 0
    assert [len(part) for part in empty.chunk(2)] == [0, 0]
    assert empty.union(DataProto.from_dict({"advantages": torch.zeros(0, 5)}))["advantages"].shape == (0, 5)
    buffer = io.BytesIO()
    pickle.dump(empty, buffer)
    assert_same(pickle.loads(buffer.getvalue()), empty)
