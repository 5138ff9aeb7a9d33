"""Rows come out of the buffer as they went in."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from refusals import refusal
from replay.rows_here import scored_rows

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.protocol.ragged import Ragged
from verl.replay.arrow_rows import DeviceRows, SelectedRows, copied, rows_from_arrow, rows_to_arrow

KEPT = (
    "prompts", "prompt_mask", "prompt_ids", "sample_ids", "responses", "response_mask", "input_ids", "attention_mask",
    "position_ids", "policy_version", "rollout_log_probs", "token_level_scores", "greedy_scores",
)  # fmt: skip


def packed(batch: DataProto) -> pa.RecordBatch:
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
def test_rows_of_two_batches_come_back_in_the_order_of_the_records(dtype):
    batches = [scored_rows(6, seed=seed) for seed in (1, 2)]
    batches = [
        DataProto.from_dict(
            {**b.batch, "rollout_log_probs": b["rollout_log_probs"].to(dtype)}, dict(b.non_tensor_batch)
        )
        for b in batches
    ]
    parts = [SelectedRows(packed(batch), np.array([5, 0, 3])) for batch in batches]
    expected = trimmed(DataProto.concat([*(b.select(list(KEPT)) for b in batches)]), [5, 0, 3, 11, 6, 9])
    assert_equal(rows_from_arrow(parts, pad_token_id=0), expected)


def test_rows_on_a_device_are_gathered_like_those_on_the_host():
    batch = scored_rows(6, seed=3).union(DataProto.from_dict({"block": torch.arange(12).reshape(6, 2).to(torch.int16)}))
    record, rows = packed(batch), np.array([4, 0, 5])
    assert DeviceRows(record, torch.device("cpu")).select(rows).record.equals(record.take(pa.array(rows)))


def test_blocks_of_numbers_and_missing_columns_survive():
    batch = scored_rows(4).union(DataProto.from_dict({"block": torch.arange(24).reshape(4, 2, 3)}))
    other = scored_rows(4).union(DataProto.from_dict({"block": torch.zeros(4, 2, 3, dtype=torch.int64)}))
    other = other.select(non_tensor_batch_keys=["response_text"])
    found = rows_from_arrow([SelectedRows(packed(rows), np.array([3])) for rows in (batch, other)], 0)
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
    found = rows_from_arrow([SelectedRows(records[0], np.array([0, 5])), SelectedRows(records[1], np.array([5]))], 0)
    width = found["responses"].shape[1]
    assert found["routed_experts"].dtype == torch.int16
    for row, (batch, own) in enumerate([(0, 0), (0, 5), (1, 5)]):
        expected = batches[batch]["routed_experts"][own]
        kept = min(width, len(expected))
        assert torch.equal(found["routed_experts"][row, :kept], expected[:kept])
        assert (found["routed_experts"][row, kept:] == -1).all()


NUMBERS, TEXTS = [float("nan"), float("-inf"), 1e-7, 10**30], ["\ud800 half of a pair", "\u2028 \x00 é"]


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, True, None, [1, {"a": [2.5]}]])
def test_columns_come_back_as_json_reads_them(value):
    batch = scored_rows(2, seed=0)
    batch = DataProto.from_dict(dict(batch.batch), {"column": [value, "other"]})
    back = rows_from_arrow([SelectedRows(packed(batch), np.array([0, 1]))], 0)["column"]
    assert repr(list(back)) == repr([value, "other"])


def test_a_column_changed_to_what_is_no_json_value_is_refused_by_name():
    batch = DataProto.from_dict(dict(scored_rows(2, seed=0).batch), {"column": [["a"], ["b"]]})
    batch.non_tensor_batch["column"][1].append(b"bytes")
    with refusal(value="row 1", kind=DataProtoValidationError):
        packed(batch)


def test_images_come_back_with_their_rows_and_samples_of_a_prompt_share_them():
    pixels = [torch.arange(6.0).reshape(2, 3), torch.zeros(0, 3), torch.arange(9.0).reshape(3, 3) + 100]
    batch, item = scored_rows(6), [0, 0, 1, 1, 2, 2]
    images = {"media.pixel_values": Ragged.of([pixels[i] for i in item])}
    images |= {"media.image_grid_thw": Ragged.of([torch.full((len(pixels[i]), 1), i) for i in item])}
    batch = batch.union(DataProto.from_dict({"media_keys": torch.tensor([7, 7, 0, 0, 9, 9])}, ragged=images))
    bare = scored_rows(2, seed=1).union(DataProto.from_dict({"media_keys": torch.zeros(2, dtype=torch.int64)}))
    file = pa.BufferOutputStream()
    joined = pa.concat_batches([packed(batch), packed(batch)])
    with pa.ipc.new_file(file, joined.schema) as writer:
        writer.write_batch(joined)
    record = pa.ipc.open_file(file.getvalue()).get_batch(0)
    parts = [SelectedRows(record, np.array([11, 0, 2, 5])), SelectedRows(packed(bare), np.array([1]))]
    for rows in (rows_from_arrow(parts, 0), rows_from_arrow(parts[::-1], 0)[[1, 2, 3, 4, 0]]):
        assert rows["media_keys"].tolist() == [9, 7, 0, 9, 0]
        for name, field in images.items():
            for row, number in enumerate([5, 0, 2, 5]):
                assert torch.equal(rows[name][row], field[number])
            assert len(rows[name][4]) == 0
    taken = DeviceRows(record, torch.device("cpu")).select(np.array([4, 5]))
    again = rows_from_arrow([taken], 0)["media.pixel_values"]
    assert torch.equal(again[1], pixels[2])
    assert len(again.values) == len(pixels[2])  # once for both rows
    copy = copied(record, np.array([0, 1, 2, 3, 4, 5]))
    assert copy.equals(packed(batch), check_metadata=True)
    assert copy.nbytes < packed(batch).nbytes + copy.num_columns + 1  # no values of the other six rows
