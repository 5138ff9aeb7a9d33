"""Rows come out of the buffer as they went in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from replay.rows_here import scored_rows

from verl.protocol import DataProto
from verl.replay.arrow_rows import RowSegment, SegmentRows, last_rows, rows_from_arrow, rows_to_arrow

KEPT = (
    "prompts", "prompt_mask", "prompt_ids", "sample_ids", "responses", "response_mask", "input_ids", "attention_mask",
    "position_ids", "policy_version", "rollout_log_probs", "token_level_scores", "greedy_scores",
)  # fmt: skip


def packed(batch: DataProto):
    zeros = np.zeros(len(batch))
    return rows_to_arrow(batch, dict.fromkeys(("group", "step", "score", "advantage"), zeros))


def trimmed(batch: DataProto, rows: list[int]) -> DataProto:
    """Rows as if they had been drawn alone, without padding that none of them needs."""
    chosen = batch[rows]
    p = chosen["prompts"].shape[1]
    longest = int(chosen["attention_mask"][:, p:].sum(1).max()), int(chosen["prompt_mask"].sum(1).max())
    cut = {"T": slice(0, longest[0]), "P": slice(p - longest[1], p), "S": slice(p - longest[1], p + longest[0])}
    dims = {"prompts": "P", "prompt_mask": "P", "input_ids": "S", "attention_mask": "S", "position_ids": "S"}
    dims |= dict.fromkeys(("responses", "response_mask", "rollout_log_probs", "token_level_scores"), "T")
    return DataProto.from_dict(
        {name: chosen[name][:, cut[dims[name]]] if name in dims else chosen[name] for name in KEPT},
        dict(chosen.non_tensor_batch),
    )


def assert_equal(found: DataProto, expected: DataProto) -> None:
    there = expected["attention_mask"].bool()
    for name in KEPT:
        assert found[name].dtype == expected[name].dtype
        if name == "position_ids":  # off the mask they differ from engine to engine
            assert torch.equal(found[name][there], expected[name][there])
        else:
            assert torch.equal(found[name], expected[name]), name
    for name, column in expected.non_tensor_batch.items():
        assert list(found[name]) == list(column)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_rows_of_two_batches_come_back_in_any_order(dtype):
    batches = [scored_rows(6, seed=seed) for seed in (1, 2)]
    batches = [
        DataProto.from_dict(
            {**b.batch, "rollout_log_probs": b["rollout_log_probs"].to(dtype)}, dict(b.non_tensor_batch)
        )
        for b in batches
    ]
    segments = [RowSegment.of(packed(batch)) for batch in batches]
    order = np.array([5, 0, 3])
    parts = [SegmentRows(segments[0], order, np.array([4, 1, 2])), SegmentRows(segments[1], order, np.array([0, 5, 3]))]
    expected = trimmed(DataProto.concat([*(b.select(list(KEPT)) for b in batches)]), [11, 0, 3, 9, 5, 6])
    assert_equal(rows_from_arrow(parts, pad_token_id=0), expected)


def test_the_last_rows_of_a_segment_are_those_rows():
    batch = scored_rows(6, seed=3)
    last = RowSegment.of(last_rows(packed(batch), 2))
    assert_equal(rows_from_arrow([SegmentRows(last, np.arange(2), np.arange(2))], 0), trimmed(batch, [4, 5]))


def test_rows_whose_values_are_tensors_are_gathered_like_those_of_arrays():
    """As on a device."""
    batch = scored_rows(6, seed=3).union(DataProto.from_dict({"block": torch.arange(12).reshape(6, 2).to(torch.int16)}))
    segment = RowSegment.of(packed(batch))
    tensors = {name: torch.tensor(values) for name, values in segment.flat.items()}
    rows, positions = np.array([4, 0, 5]), np.array([2, 0, 1])
    expected, found = (
        rows_from_arrow([SegmentRows(one, rows, positions)], 0)
        for one in (segment, dataclasses.replace(segment, flat=tensors))
    )
    assert_equal(found, expected.select([*KEPT]))
    assert torch.equal(found["block"], expected["block"])


def test_blocks_of_numbers_and_missing_columns_survive():
    batch = scored_rows(4).union(DataProto.from_dict({"block": torch.arange(24).reshape(4, 2, 3)}))
    other = scored_rows(4).union(DataProto.from_dict({"block": torch.zeros(4, 2, 3, dtype=torch.int64)}))
    other = other.select(non_tensor_batch_keys=["response_text"])
    parts = [
        SegmentRows(RowSegment.of(packed(one)), np.array([3]), np.array([place]))
        for place, one in enumerate((batch, other))
    ]
    found = rows_from_arrow(parts, 0)
    assert torch.equal(found["block"][0], batch["block"][3])
    assert list(found["length"]) == [3, None]


def test_experts_of_each_token_survive():
    """A block of numbers for each token, -1 where nothing is known."""
    batches, generator = [scored_rows(6, seed=seed) for seed in (1, 2)], torch.Generator().manual_seed(0)
    for place, batch in enumerate(batches):
        mask = batch["response_mask"][:, :, None, None]
        drawn = torch.randint(0, 128, (*batch["responses"].shape, 3, 2), generator=generator)
        routed = torch.where(mask, drawn, -1).to(torch.int16)
        batches[place] = batch.union(DataProto.from_dict({"routed_experts": routed}))
    records = [packed(batch) for batch in batches]
    parts = [
        SegmentRows(RowSegment.of(records[0]), np.array([5, 0]), np.array([1, 0])),
        SegmentRows(RowSegment.of(last_rows(records[1], 2)), np.array([1]), np.array([2])),
    ]
    found = rows_from_arrow(parts, 0)
    width = found["responses"].shape[1]
    assert found["routed_experts"].dtype == torch.int16
    for row, (batch, own) in enumerate([(0, 0), (0, 5), (1, 5)]):
        expected = batches[batch]["routed_experts"][own]
        kept = min(width, len(expected))
        assert torch.equal(found["routed_experts"][row, :kept], expected[:kept])
        assert (found["routed_experts"][row, kept:] == -1).all()
