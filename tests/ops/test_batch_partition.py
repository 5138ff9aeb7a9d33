import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.ops.batching import BatchPartition
from verl.protocol import DataProto

batches = st.lists(st.integers(1, 9), max_size=12).map(lambda lengths: rows_of(lengths))


def rows_of(lengths: list[int]) -> DataProto:
    """A row of each length: attention_mask [B S] padded on the left, a number and a text."""
    width = max(lengths, default=1)
    mask = torch.arange(width) >= width - torch.tensor(lengths, dtype=torch.int64)[:, None]
    return DataProto.from_dict(
        {"attention_mask": mask.long(), "number": torch.arange(len(lengths))},
        {"text": [f"row {row}" for row in range(len(lengths))]},
        {"pad_token_id": 7},
    )


def columns(batch: DataProto) -> dict[str, list]:
    return {name: batch[name].tolist() for name in (*batch.batch, *batch.non_tensor_batch)}


@given(batches, st.integers(1, 5))
def test_dividing_and_joining_gives_the_same_rows_in_the_same_order(batch, parts):
    division = BatchPartition(batch, parts)
    shares = division.split_rows(batch)
    joined = division.join(shares)
    assert len(shares) == parts
    assert columns(joined) == columns(batch)
    assert joined.meta_info == batch.meta_info


@given(batches, st.integers(1, 5), st.integers(1, 4))
def test_several_answers_to_a_row_are_joined_beside_each_other(batch, parts, samples):
    division = BatchPartition(batch, parts)
    answers = []
    for share in division.split_rows(batch):
        rows = share.select(["number"]).repeat(samples)
        numbers = torch.arange(samples).repeat(len(share))
        answers.append(rows.union(DataProto.from_dict({"sample_ids": numbers})))
    joined = division.join(answers)
    expected = batch.select(["number"]).repeat(samples)
    assert joined["number"].tolist() == expected["number"].tolist()
    assert joined["sample_ids"].tolist() == list(range(samples)) * len(batch)


@given(batches, st.integers(1, 5))
def test_counts_differ_by_at_most_one_and_tokens_by_at_most_the_longest_row(batch, parts):
    shares = BatchPartition(batch, parts).split_rows(batch)
    counts = [len(share) for share in shares]
    tokens = [int(share["attention_mask"].sum()) for share in shares]
    longest = int(batch["attention_mask"].sum(dim=1).max()) if len(batch) else 0
    assert max(counts) - min(counts) <= 1
    assert max(tokens) - min(tokens) <= longest


def test_a_process_without_rows_may_answer_without_fields():
    batch = rows_of([3, 1])
    division = BatchPartition(batch, 3)
    answers = [
        share.select(["number"], []) if len(share) else DataProto.from_dict({}) for share in division.split_rows(batch)
    ]
    assert sum(len(answer) == 0 for answer in answers) == 1
    assert division.join(answers)["number"].tolist() == [0, 1]


def test_prompts_are_weighed_by_their_own_mask():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    shares = BatchPartition(DataProto.from_dict({"prompt_mask": mask}), 2).split_rows(
        DataProto.from_dict({"prompt_mask": mask})
    )
    assert sorted(int(share["prompt_mask"].sum()) for share in shares) == [3, 5]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_joined_answer_is_padded_to_the_longest_response_of_all(parts):
    batch = rows_of([5, 2, 4])
    division = BatchPartition(batch, parts)
    answers = []
    for share in division.split_rows(batch):
        lengths = share["number"] + 1  # row 2 answers with three tokens
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        answers.append(
            DataProto.from_dict({"response_mask": mask, "responses": torch.where(mask, 5, 7)}, {}, {"pad_token_id": 7})
        )
    joined = division.join(answers)
    assert joined["responses"].tolist() == [[5, 7, 7], [5, 5, 7], [5, 5, 5]]
