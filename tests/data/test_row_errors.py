"""Rows that cannot be used: all named by file and number, or left out and counted."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from verl.component import BuildContext
from verl.data.files import PromptFiles, SFTFiles
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.errors import ConfigError
from verl.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
LINES = (
    b'{"prompt": "1+1=", "completion": "2"}\n',
    b'{"prompt": null, "completion": "2"}\n',
    b'{"prompt": "", "completion": "2"}\n',
    b'{"prompt": 7, "completion": "2"}\n',
    b'{"prompt": "\xff\xfe", "completion": "2"}\n',
    b'{"prompt": "\\ud83d", "completion": "2"}\n',
    b'{"prompt": \n',
    b'["prompt"]\n',
    b'{"question": "1+1=", "completion": "2"}\n',
    b'{"prompt": "3+4=", "completion": "7"}\n',
)
SAID = (
    (2, "prompt is None"),
    (3, "prompt is ''"),
    (4, "prompt is 7"),
    (5, "is not UTF-8 text"),
    (6, "expected valid Unicode"),
    (7, "is not valid JSON"),
    (8, "expected a JSON object"),
    (9, "no such column"),
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


@pytest.mark.parametrize(("line", "words"), SAID)
@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_each_kind_of_unusable_row_is_an_error_that_names_file_and_line(kind, line, words, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES[0] * (line - 1) + LINES[line - 1] + LINES[9])
    with pytest.raises(ConfigError) as refused:
        kind([path], TOKENIZER)
    assert len(refused.value.faults) == 1
    assert all(said in str(refused.value) for said in (words, f"line {line}", str(path), "set on_bad_row to skip"))


@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_all_unusable_rows_are_counted_in_one_error(kind, file):
    with pytest.raises(ConfigError) as refused:
        kind([file], TOKENIZER)
    assert len(refused.value.faults) == 5
    assert "And 3 further rows of 10. Fix the data, or set on_bad_row to skip." in refused.value.faults[-1]


@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_skipping_leaves_the_rows_out_and_says_how_many_and_the_first_few(kind, file, caplog):
    dataset = kind([file], TOKENIZER, {"on_bad_row": "skip"})
    assert len(dataset) == 2
    assert "on_bad_row is skip: 8 of 10 rows are left out: " in caplog.text
    assert "line 5 is not UTF-8 text" in caplog.text
    assert f"prompt is None at line 2 of {file}" in caplog.text
    assert "and 3 further rows." in caplog.text


def test_the_ids_of_prompts_do_not_change_when_rows_before_them_are_skipped(file):
    dataset = RLHFDataset([file], TOKENIZER, {"on_bad_row": "skip"})
    assert dataset.collate([0, 1])["prompt_ids"].tolist() == [0, 9]
    assert list(dataset.collate([1])["completion"]) == ["7"]


def test_a_completion_that_cannot_be_learned_is_a_bad_row_too(caplog):
    rows = [{"prompt": "1", "completion": text} for text in (None, "", 3, "4")]
    dataset = SFTDataset.from_rows(rows, TOKENIZER, {"on_bad_row": "skip"})
    assert TOKENIZER.decode(dataset[0]["input_ids"]) == "14<eos>"
    assert "3 of 4 rows are left out: completion is None at row 0" in caplog.text


@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_skipping_every_row_is_an_error(kind):
    with pytest.raises(ConfigError, match="1 of 1 rows are left out: prompt is None at row 0.*No row remains"):
        kind.from_rows([{"prompt": None, "completion": "1"}], TOKENIZER, {"on_bad_row": "skip"})


def test_a_file_without_one_readable_line_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\n\xfe\n")
    with pytest.raises(ConfigError, match="2 of 2 rows are left out: .*line 1 is not UTF-8.*No row remains"):
        RLHFDataset([tmp_path / "a.jsonl"], TOKENIZER, {"on_bad_row": "skip"})


def test_a_parquet_row_that_is_not_utf8_is_named_by_its_row(tmp_path):
    raw = pyarrow.array([b"1+1=", b"\xff", b"2+2="], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())  # as a careless writer stores it
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), path)
    with pytest.raises(ConfigError, match="row 1 is not UTF-8 text"):
        RLHFDataset([path], TOKENIZER)
    assert len(RLHFDataset([path], TOKENIZER, {"on_bad_row": "skip"})) == 2


@pytest.mark.parametrize("truncation", ["error", "drop", "left", "right"])
def test_a_prompt_of_100_000_characters_meets_the_truncation_policy(truncation, tmp_path, caplog):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1" * 100_000, "2")))
    config = {"max_prompt_length": 16, "truncation": truncation, "on_bad_row": "skip"}
    said = f"max_prompt_length is 16: 1 of 2 rows have more tokens; the longest, line 1 of {path}, has 100000."
    if truncation == "error":  # too long is not broken: on_bad_row does not drop what truncation refuses
        with pytest.raises(ConfigError, match=said):
            RLHFDataset([path], TOKENIZER, config)
        return
    dataset = RLHFDataset([path], TOKENIZER, config)
    assert dataset.tokens.lengths.tolist() == ([1] if truncation == "drop" else [16, 1])
    assert said in caplog.text


def test_a_bad_prompt_of_100_000_characters_is_shortened_in_the_message():
    with pytest.raises(ConfigError) as refused:
        RLHFDataset.from_rows([{"prompt": "\ud83d" + "x" * 100_000}], TOKENIZER)
    assert len(str(refused.value)) < 300


def test_rows_are_skipped_in_files_for_training_and_evaluation(file):
    context = BuildContext(tokenizer=TOKENIZER)
    for kind in (PromptFiles, SFTFiles):
        splits = kind(train_files=[str(file)], eval_files=[str(file)], on_bad_row="skip").build(context)
        assert (len(splits.train), len(splits.eval)) == (2, 2)
