"""Prompts from parquet and JSONL: what a batch holds, what happens to long prompts, and what is refused."""

import datetime
import decimal
import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from refusals import refusal, refused

from verl.component import BuildContext
from verl.data.base import DataSplits, report_counts
from verl.data.files import PromptFiles
from verl.data.rlhf_dataset import RLHFDataset
from verl.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "10+20=", "answer": "30", "level": 2},
    {"prompt": "7+8=", "answer": "15", "level": 1},
]


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_rows(rows, **config):
    return RLHFDataset.from_rows(rows, tokenizer=TOKENIZER, config=config)


@pytest.fixture(params=["parquet", "jsonl"])
def file(request, tmp_path):
    return write(tmp_path / f"train.{request.param}", ROWS)


def test_a_batch_holds_left_padded_prompts_and_every_other_column(file):
    dataset = RLHFDataset(data_files=[str(file)], tokenizer=TOKENIZER, config={"max_prompt_length": 512})
    assert len(dataset) == 3
    batch = dataset.collate([2, 1]).check(strict=True)
    assert batch["prompts"].shape == batch["prompt_mask"].shape == (2, 6)
    assert batch["prompts"][0].tolist() == [0, 0, *TOKENIZER.encode("7+8=")]
    assert batch["prompt_mask"].tolist() == [[False] * 2 + [True] * 4, [True] * 6]
    assert batch["prompt_ids"].tolist() == [2, 1]
    assert list(batch["prompt_text"]) == ["7+8=", "10+20="]
    assert (list(batch["answer"]), list(batch["level"])) == (["15", "30"], [1, 2])
    assert "prompt" not in batch


def test_indices_come_as_a_list_a_range_or_a_tensor(file):
    dataset = RLHFDataset(file, TOKENIZER)
    whole = dataset.collate(range(3))["prompts"]
    assert torch.equal(dataset.collate(torch.arange(3))["prompts"], whole)
    assert torch.equal(dataset.collate([0, 1, 2])["prompts"], whole)
    assert len(dataset.collate([])) == 0


def test_one_row_is_not_padded(file):
    row = RLHFDataset(file, TOKENIZER)[-1]
    assert row["prompts"].tolist() == TOKENIZER.encode("7+8=")
    assert (row["prompt_ids"], row["prompt_text"], row["answer"]) == (2, "7+8=", "15")
    with pytest.raises(IndexError):
        RLHFDataset(file, TOKENIZER)[3]


def test_files_of_both_kinds_follow_one_another(tmp_path):
    files = [write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.parquet", ROWS[2:])]
    assert list(RLHFDataset(files, TOKENIZER).collate(range(3))["answer"]) == ["2", "30", "15"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_chat_messages_go_through_the_template_up_to_the_assistant(tmp_path, suffix):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    file = write(tmp_path / f"chat.{suffix}", [{"prompt": messages}])
    batch = RLHFDataset([file], TOKENIZER).collate([0])
    assert batch["prompt_text"][0] == "<system>Add.<eos><user>1+1=<eos><assistant>"
    assert batch["prompts"][0].tolist() == TOKENIZER.encode("<system>Add.<eos><user>1+1=<eos><assistant>")


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
    rows = [{"prompt": [{"role": "user", "content": "1+1"}]}, {"prompt": "as it is"}]
    assert list(open_rows(rows, chat_template=template).collate([0, 1])["prompt_text"]) == ["1+1: ", "as it is"]


def test_texts_get_the_special_tokens_of_the_tokenizer_and_templates_write_their_own():
    from tokenizers.processors import TemplateProcessing

    with_bos = character_tokenizer()
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    rows = [{"prompt": [{"role": "user", "content": "1"}]}, {"prompt": "1"}]
    dataset = RLHFDataset.from_rows(rows, tokenizer=with_bos)
    assert dataset[0]["prompts"].tolist() == TOKENIZER.encode("<user>1<eos><assistant>")
    assert dataset[1]["prompts"].tolist() == [1, *TOKENIZER.encode("1")]


def test_lists_in_a_column_stay_one_object_per_row():
    rows = [{"prompt": "1", "tests": [1, 2]}, {"prompt": "2", "tests": [3, 4]}]
    assert list(open_rows(rows).collate([1, 0])["tests"]) == [[3, 4], [1, 2]]


def test_dates_become_texts_decimals_numbers_and_a_column_of_other_values_is_left_out_with_a_warning(caplog):
    rows = [{"prompt": "1", "when": [datetime.date(2020, 1, 2)], "price": {"a": decimal.Decimal("1.5")}, "pair": (1,)}]
    batch = RLHFDataset.from_rows(rows, TOKENIZER).collate([0])
    found = [batch[name].tolist() for name in ("when", "price", "pair")]
    assert found == [[["2020-01-02"]], [{"a": 1.5}], [[1]]]
    rows = [{"prompt": "1"}, {"prompt": "2", "image": {"bytes": b"x"}}]
    assert "image" not in RLHFDataset.from_rows(rows, TOKENIZER).columns
    assert "The column 'image' is left out" in caplog.text
    assert "a value of type bytes at row 1['bytes']" in caplog.text


def test_a_column_that_a_row_lacks_is_none_there():
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "2", "hint": "two"}]
    batch = open_rows(rows).collate([0, 1])
    assert (list(batch["answer"]), list(batch["hint"])) == (["1", None], [None, "two"])


def test_a_tokenizer_without_a_pad_token_pads_with_its_eos():
    unpadded = character_tokenizer()
    unpadded.pad_token = None
    batch = RLHFDataset.from_rows(ROWS, tokenizer=unpadded).collate([0, 1])
    assert batch["prompts"][0, :2].tolist() == [1, 1]
    assert batch["prompt_mask"][0].tolist() == [False] * 2 + [True] * 4


@pytest.mark.parametrize(("truncation", "kept"), [("left", "+20="), ("right", "10+2")])
def test_a_long_prompt_is_cut_on_the_side_that_truncation_names(truncation, kept):
    batch = open_rows(ROWS, max_prompt_length=4, truncation=truncation).collate([0, 1])
    assert list(batch["prompt_text"]) == ["1+1=", kept]
    assert batch["prompts"][1].tolist() == TOKENIZER.encode(kept)


def test_rows_dropped_for_their_length_leave_the_ids_of_the_others_alone(caplog):
    dataset = open_rows(ROWS, max_prompt_length=4, truncation="drop")
    assert len(dataset) == 2
    assert dataset.collate([0, 1])["prompt_ids"].tolist() == [0, 2]
    assert list(dataset.collate([0, 1])["answer"]) == ["2", "15"]
    assert "max_prompt_length is 4: 1 of 3 rows have more tokens" in caplog.text


FIELDS = ("responses", "prompts", "prompt_text", "score", "advantages")


def of(rows, **config):
    """What opens these rows, or the file of these bytes in the directory of the test."""
    return lambda: open_rows(rows, **config)


def of_file(name, content, **config):
    def opened(tmp_path):
        file = tmp_path / name
        write(file, content) if isinstance(content, list) else file.write_bytes(content)
        RLHFDataset([file], TOKENIZER, config)

    return opened


def empty_parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "e.parquet")
    RLHFDataset([tmp_path / "e.parquet"], TOKENIZER)


def folder(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    RLHFDataset([tmp_path / "folder.jsonl"], TOKENIZER)


RAISES = "{{ raise_exception('u') if messages }}"
NO_PROMPTS = (None, 7, "", [], ["1+1="], [{"role": "user"}], [{"role": "user", "content": None}])
test_rows_and_settings_that_cannot_be_are_named = refused(
    ("config.max_promt_length", "max_prompt_length", of(ROWS, max_promt_length=4)),
    ("config.zzz", "max_prompt_length", of(ROWS, zzz=4)),
    ("max_prompt_length", 0, of(ROWS, max_prompt_length=0)),
    ("max_prompt_length", "512", of(ROWS, max_prompt_length="512")),
    ("max_prompt_length", 1, of(ROWS, max_prompt_length=1, truncation="drop")),
    ("max_prompt_length", 4, of_file("train.jsonl", ROWS, max_prompt_length=4)),
    ("max_prompt_length", 4, of(ROWS, max_prompt_length=4, on_bad_row="skip")),  # too long is not broken
    ("max_prompt_length", 16, of([{"prompt": "1" * 100_000}, {"prompt": "2"}], max_prompt_length=16)),
    ("truncation", "middle", of(ROWS, truncation="middle")),
    ("chat_template", "row 0", of([{"prompt": [{"role": "user", "content": "1"}]}], chat_template=RAISES)),
    *(("column", name, of([{"prompt": "1", name: "2"}])) for name in FIELDS),
    *(("prompt", x, of_file("train.jsonl", [{"prompt": "1+1="}, {"prompt": x}])) for x in NO_PROMPTS),
    ("prompt", "line 4", of_file("train.jsonl", b'{"prompt": "1"}\n\n\n{"prompt": null}\n')),  # as an editor counts
    ("prompt", "row 1", of_file("train.parquet", [{"prompt": "1+1="}, {"prompt": None}])),
    ("data_files[0]", "a.parquet", of_file("a.parquet", b"not parquet")),
    ("data_files[0]", "line 2", of_file("b.jsonl", b'{"prompt": "1"}\n{"prompt": \n')),
    ("data_files[0]", "line 1", of_file("c.jsonl", b'["prompt"]\n')),
    ("data_files[0]", "UTF-8", of_file("d.jsonl", b'{"prompt": "\xff"}\n')),
    ("data_files[0]", "empty.jsonl", of_file("empty.jsonl", b"\n \n")),
    ("data_files[0]", "e.parquet", empty_parquet),
    ("data_files[0]", "folder.jsonl", folder),
    (("data_files[0]", "data_files[1]"), "b.csv", lambda: RLHFDataset(["a.parquet", "b.csv"], TOKENIZER)),
    ("rows", "[]", of([])),
    ("data_files", "empty", lambda: RLHFDataset([], TOKENIZER)),
)


@pytest.mark.parametrize(("suffix", "place"), [("parquet", "row 0"), ("jsonl", "line 1")])
def test_an_absent_prompt_column_is_named_with_those_present(tmp_path, suffix, place):
    file = write(tmp_path / f"train.{suffix}", [{"question": "1+1=", "answer": "2"}])
    with refusal("prompt_key", value=place):
        RLHFDataset([file], TOKENIZER)
    assert RLHFDataset([file], TOKENIZER, config={"prompt_key": "question"})[0]["prompt_text"] == "1+1="


def test_rows_that_repeat_another_and_those_in_both_parts_are_counted_and_told_once(tmp_path, caplog):
    train = write(
        tmp_path / "train.jsonl", [*ROWS, {"prompt": "1+1=", "answer": "2"}, {"prompt": "5+5=", "answer": "1"}]
    )
    held_out = write(tmp_path / "eval.jsonl", [ROWS[1], {"prompt": "9+9=", "answer": "18"}])
    described = PromptFiles(train_files=(str(train),), eval_files=(str(held_out),))
    splits = described.build(BuildContext(tokenizer=TOKENIZER))
    assert report_counts(splits) == {
        "train_rows": 5, "eval_rows": 2, "train_duplicates": 1, "eval_duplicates": 0, "eval_rows_in_train": 1
    }  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "Data: 1 of 5 training rows repeat another one; 1 of 2 evaluation rows are also training rows, so evaluation "
        "scores are too high."
    ]
    caplog.clear()
    assert report_counts(DataSplits(train=splits.eval)) == {"train_rows": 2, "train_duplicates": 0}
    assert not caplog.records
