"""Sequences to imitate: what is learned, how rows are padded, and what is refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from refusals import refused

from verl.data.base import DataSplits, report_counts
from verl.data.sft_dataset import SFTDataset
from verl.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
ROWS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "10+20=", "completion": "30"}]


def open_rows(rows, **config):
    return SFTDataset.from_rows(rows, tokenizer=TOKENIZER, config=config)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("column", ["completion", "response"])
def test_the_completion_and_its_eos_are_learned_and_nothing_else(tmp_path, suffix, column):
    rows = [{"prompt": row["prompt"], column: row["completion"]} for row in ROWS]
    file = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = SFTDataset([file], TOKENIZER, config={"max_length": 64})
    batch = dataset.collate([0, 1]).check(strict=True)
    assert TOKENIZER.decode(batch["input_ids"][0]) == "1+1=2<eos><pad><pad><pad>"
    assert TOKENIZER.decode(batch["input_ids"][1]) == "10+20=30<eos>"
    assert [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)] == [
        "2<eos>",
        "30<eos>",
    ]


def test_rows_are_padded_on_the_right_and_positions_count_tokens():
    batch = open_rows(ROWS).collate(torch.tensor([0, 1]))
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 3, [1] * 9]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0], list(range(9))]
    assert {batch[name].dtype for name in ("input_ids", "attention_mask", "position_ids")} == {torch.int64}
    assert batch["loss_mask"].dtype == torch.bool


def test_padding_is_never_learned_even_where_its_id_is_that_of_eos():
    unpadded = character_tokenizer()
    unpadded.pad_token = None
    batch = SFTDataset.from_rows(ROWS, tokenizer=unpadded).collate([0, 1])
    assert batch["input_ids"][0].tolist()[-4:] == [1] * 4
    assert batch["loss_mask"].sum(dim=1).tolist() == [2, 3]


def test_the_prompt_has_the_tokens_that_generation_starts_from():
    from verl.data.rlhf_dataset import RLHFDataset

    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"}, ROWS[1]]
    prompts, learned = RLHFDataset.from_rows(rows, tokenizer=TOKENIZER), open_rows(rows)
    for index in range(2):
        row = learned[index]
        assert row["input_ids"][~row["loss_mask"]].tolist() == prompts[index]["prompts"].tolist()


def test_lengths_count_tokens_without_padding():
    dataset = open_rows(ROWS)
    assert dataset.lengths.tolist() == [6, 9]
    assert len(dataset) == 2
    assert len(dataset.collate([])) == 0


@pytest.mark.parametrize(
    ("limit", "truncation", "kept", "learned"),
    [
        (6, "left", ["1+1=2<eos>", "20=30<eos>"], ["2<eos>", "30<eos>"]),
        (7, "right", ["1+1=2<eos>", "10+20=3"], ["2<eos>", "3"]),
        (6, "drop", ["1+1=2<eos>"], ["2<eos>"]),
    ],
)
def test_a_long_sequence_is_cut_on_the_side_that_is_named_or_left_out(limit, truncation, kept, learned):
    rows = [*open_rows(ROWS, max_length=limit, truncation=truncation)]
    assert [TOKENIZER.decode(row["input_ids"]) for row in rows] == kept
    assert [TOKENIZER.decode(row["input_ids"][row["loss_mask"]]) for row in rows] == learned


def endless():
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


test_rows_and_settings_that_cannot_be_learned_are_refused = refused(
    ("completion_key", "completion", lambda: open_rows([{"prompt": "1", "answer": "1"}])),
    ("prompt_key", "prompt", lambda: open_rows([{"text": "1", "completion": "1"}])),
    ("completion", None, lambda: open_rows([{"prompt": "1", "completion": None}])),
    ("completion", "", lambda: open_rows([{"prompt": "1", "completion": ""}])),
    ("response", 5, lambda: open_rows([{"prompt": "1", "response": 5}])),
    ("config.max_lenght", "max_length", lambda: open_rows(ROWS, max_lenght=5)),
    ("max_length", 1, lambda: open_rows(ROWS, max_length=1)),
    ("max_length", 8, lambda: open_rows(ROWS, max_length=8)),
    ("max_length", 3, lambda: open_rows(ROWS, max_length=3, truncation="left")),
    ("max_length", 6, lambda: open_rows(ROWS, max_length=6, truncation="right")),
    ("rows", "[]", lambda: open_rows([])),
    ("tokenizer", "EOS", lambda: SFTDataset.from_rows(ROWS, tokenizer=endless())),
)


def test_rows_that_repeat_another_and_those_in_both_parts_are_counted_and_told(caplog):
    train = open_rows([*ROWS, ROWS[0], {"prompt": "1+1=", "completion": "3"}])
    assert report_counts(DataSplits(train=train, eval=open_rows(ROWS[1:]))) == {
        "train_rows": 4, "eval_rows": 1, "train_duplicates": 1, "eval_duplicates": 0, "eval_rows_in_train": 1
    }  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "Data: 1 of 4 training rows repeat another one; 1 of 1 evaluation rows are also training rows, so evaluation "
        "scores are too high."
    ]


def test_rows_that_were_drawn_from_a_distribution_may_repeat(caplog):
    counts = report_counts(DataSplits(train=open_rows([*ROWS, ROWS[0]]), may_repeat=True))
    assert counts["train_duplicates"] == 1
    assert not caplog.records
