"""Preference data: the forms of TRL, batches of pairs and of labelled responses, and rows refused by file and line."""

import json
import math

import pyarrow
import pyarrow.parquet
import pytest
from refusals import refusal

from verl.component import BuildContext
from verl.data.arithmetic import ArithmeticPreferences
from verl.data.files import PreferenceFiles
from verl.models.tiny import character_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TEXT = {"prompt": "1+2=", "chosen": "3", "rejected": "14"}
CHAT = {"prompt": [user("1+2=")], "chosen": [assistant("3")], "rejected": [assistant("14")]}
CONTAINED = {"chosen": [user("1+2="), assistant("3")], "rejected": [user("1+2="), assistant("14")]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(tmp_path, rows, **options):
    source = PreferenceFiles(train_files=[write(tmp_path / "train.jsonl", rows)], **options)
    return source.build(BuildContext(tokenizer=character_tokenizer())).train


def texts(data, row=0):
    decode = character_tokenizer().decode
    return {name: decode(ids) for name, ids in data[row].items() if name != "label"}


def test_a_text_ends_with_eos_and_a_chat_with_its_template(tmp_path):
    assert texts(dataset(tmp_path, [TEXT])) == {"prompts": "1+2=", "chosen": "3<eos>", "rejected": "14<eos>"}
    expected = {"prompts": "<user>1+2=<eos><assistant>", "chosen": "3<eos>", "rejected": "14<eos>"}
    assert texts(dataset(tmp_path, [CHAT])) == expected
    for prompt in ({}, {"prompt": "1+2="}, {"prompt": CHAT["prompt"]}):  # as in UltraFeedback
        assert texts(dataset(tmp_path, [CONTAINED | prompt])) == expected
    assert texts(dataset(tmp_path, [TEXT], system_prompt="Add."))["prompts"].startswith("<system>Add.<eos><user>1+2=")


def test_the_prompt_of_texts_is_what_both_begin_with(tmp_path):
    for chosen, rejected in (("three", "four"), ("14", "15"), ("one", "onetwo")):  # no word is divided
        row = {"chosen": f"Sum of 1 and 2: {chosen}", "rejected": f"Sum of 1 and 2: {rejected}"}
        assert texts(dataset(tmp_path, [row]))["prompts"] == "Sum of 1 and 2:"


def test_parquet_gives_what_jsonl_gives(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT]), tmp_path / "train.parquet")
    source = PreferenceFiles(train_files=[str(tmp_path / "train.parquet")])
    found = source.build(BuildContext(tokenizer=character_tokenizer())).train
    assert texts(found) == texts(dataset(tmp_path, [CHAT]))


def test_a_batch_has_the_chosen_rows_and_then_the_rejected_ones(tmp_path):
    data = dataset(tmp_path, [TEXT, {"prompt": "40+2=", "chosen": "42", "rejected": "41, I think"}])
    batch = data.collate([1, 0])
    decode = character_tokenizer().decode
    rows = [decode(ids[mask.bool()]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert rows == ["40+2=42<eos>", "1+2=3<eos>", "40+2=41, I think<eos>", "1+2=14<eos>"]
    assert batch["is_chosen"].tolist() == [True, True, False, False]
    assert batch["response_mask"].sum(dim=1).tolist() == [3, 2, 12, 3]
    assert "row_margins" not in batch
    assert batch["position_ids"][1].tolist()[:6] == [0, 0, 1, 2, 3, 4]


def test_labelled_responses_come_with_mismatched_rows(tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1), "label": i != 1} for i in range(3)]
    batch = dataset(tmp_path, rows).collate([0, 1, 2])
    decode = character_tokenizer().decode
    found = [decode(ids[mask.bool()]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert found[:3] == ["0+1=1<eos>", "1+1=2<eos>", "2+1=3<eos>"]
    assert found[3:] == ["0+1=3<eos>", "1+1=1<eos>", "2+1=2<eos>"]
    assert batch["is_chosen"].tolist() == [True, False, True] * 2


def test_pairs_taken_apart_are_labelled_responses(tmp_path):
    batch = dataset(tmp_path, [TEXT]).unpaired().collate([0, 1])
    assert batch["is_chosen"].tolist()[:2] == [True, False]
    assert batch["response_mask"].sum(dim=1).tolist()[:2] == [2, 3]


@pytest.mark.parametrize(
    ("row", "path", "value"),
    [
        ({"prompt": "1+2=", "chosen": "3"}, "rejected_key", "rejected"),
        ({**TEXT, "rejected": "3"}, "rejected", "3"),
        ({**TEXT, "chosen": ""}, "chosen", ""),
        ({**TEXT, "chosen": 3}, "chosen", 3),
        ({**TEXT, "prompt": 5}, "prompt", 5),
        ({"chosen": "ab", "rejected": "cd"}, "prompt", ""),
        ({"chosen": "a b", "rejected": "a b c"}, "chosen", "a b"),
        ({**TEXT, "prompt": "1\ud800"}, "prompt", "1\ud800"),
        ({**TEXT, "chosen": [assistant("3")]}, "chosen", [assistant("3")]),
        *(({**TEXT, "margin": margin}, "margin", margin) for margin in ("much", None, True, math.nan, math.inf)),
        ({**TEXT, "margin": 10**400}, "margin", "line 2"),
    ],
    ids=lambda value: None if isinstance(value, dict) else repr(value)[:20],
)
def test_a_bad_row_is_named_by_its_file_and_line_and_may_be_left_out(row, path, value, tmp_path):
    rows = [{**TEXT, **({"margin": 1.0} if "margin" in row else {})}, row]
    with refusal(path, value=value):
        dataset(tmp_path, rows)
    assert len(dataset(tmp_path, rows, on_bad_row="skip")) == 1


def test_a_column_label_of_pairs_is_another_column(tmp_path):
    assert texts(dataset(tmp_path, [{**TEXT, "label": "helpful"}]))["chosen"] == "3<eos>"


@pytest.mark.parametrize(("limit", "tokens"), [("max_prompt_length", 7), ("max_length", 11)])
def test_a_row_longer_than_a_limit_is_named_by_its_file_and_line_and_may_be_dropped(limit, tokens, tmp_path):
    rows = [TEXT, {"prompt": "100+20=", "chosen": "120", "rejected": "12"}]
    with refusal(limit, value=tokens - 1):
        dataset(tmp_path, rows, **{limit: tokens - 1})
    assert len(dataset(tmp_path, rows, truncation="drop", **{limit: tokens - 1})) == 1


def test_wrong_sums_are_near_the_right_one():
    pairs = ArithmeticPreferences(train_size=300).pairs("train")
    assert pairs == ArithmeticPreferences(train_size=300).pairs("train")
    for pair in pairs:
        left, right = pair["prompt"].rstrip("=").split("+")
        assert int(pair["chosen"]) == int(left) + int(right)
        assert abs(int(pair["chosen"]) - int(pair["rejected"])) in (1, 2, 3, 10, 20)
