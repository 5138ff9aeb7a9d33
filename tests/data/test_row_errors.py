"""Rows that cannot be used: all named by file and number, or left out and counted."""

import pyarrow
import pyarrow.parquet
import pytest
from refusals import refusal, refused

from verl.component import BuildContext
from verl.data.files import PromptFiles, SFTFiles
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
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
SAID = ((2, None), (3, ""), (4, 7), (5, "UTF-8"), (6, "Unicode"), (7, "JSON"), (8, "object"), (9, "column"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


@pytest.mark.parametrize(("line", "value"), SAID)
@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_each_kind_of_unusable_row_is_an_error_that_names_file_and_line(kind, line, value, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES[0] * (line - 1) + LINES[line - 1] + LINES[9])
    named = "data_files[0]" if line in (5, 7, 8) else "prompt_key" if line == 9 else "prompt"
    with refusal(named, value=value) as caught:
        kind([path], TOKENIZER)
    assert f"line {line}" in str(caught.value)


@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_all_unusable_rows_are_counted_in_one_error(kind, file):
    with refusal(*["data_files[0]"] * 3, "prompt", "prompt", value="3 further rows of 10"):
        kind([file], TOKENIZER)


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


def test_a_parquet_row_that_is_not_utf8_is_named_by_its_row(tmp_path):
    raw = pyarrow.array([b"1+1=", b"\xff", b"2+2="], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())  # as a careless writer stores it
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), path)
    with refusal("data_files[0]", value="row 1"):
        RLHFDataset([path], TOKENIZER)
    assert len(RLHFDataset([path], TOKENIZER, {"on_bad_row": "skip"})) == 2


def unreadable(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\n\xfe\n")
    return [tmp_path / "a.jsonl"]


SKIP, NONE = {"on_bad_row": "skip"}, [{"prompt": None, "completion": "1"}]
test_nothing_that_is_left_and_a_long_prompt_are_told_shortly = refused(
    ("on_bad_row", "skip", lambda: RLHFDataset.from_rows(NONE, TOKENIZER, SKIP)),
    ("on_bad_row", "skip", lambda: SFTDataset.from_rows(NONE, TOKENIZER, SKIP)),
    ("on_bad_row", "skip", lambda tmp_path: RLHFDataset(unreadable(tmp_path), TOKENIZER, SKIP)),
    ("prompt", "row 0", lambda: RLHFDataset.from_rows([{"prompt": "\ud83d" + "x" * 100_000}], TOKENIZER)),
)


def test_rows_are_skipped_in_files_for_training_and_evaluation(file):
    context = BuildContext(tokenizer=TOKENIZER)
    for kind in (PromptFiles, SFTFiles):
        splits = kind(train_files=[str(file)], eval_files=[str(file)], on_bad_row="skip").build(context)
        assert (len(splits.train), len(splits.eval)) == (2, 2)
