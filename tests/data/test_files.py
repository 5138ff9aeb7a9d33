"""Descriptions of data that lies in files: what they build, and what they find wrong before anything is read."""

import json
import pickle

import pytest
from refusals import refusal

from verl.component import BuildContext
from verl.data.files import PromptFiles, SFTFiles
from verl.models.tiny import character_tokenizer

CONTEXT = BuildContext(tokenizer=character_tokenizer())


@pytest.fixture
def files(tmp_path):
    for name, count in (("train", 3), ("test", 2)):
        rows = [{"prompt": f"{index}+1=", "completion": str(index + 1), "question": "?"} for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train_files": [str(tmp_path / "train.jsonl")], "eval_files": [str(tmp_path / "test.jsonl")]}


def test_prompts_for_training_and_evaluation_are_built_with_the_tokenizer_of_the_run(files):
    splits = PromptFiles(**files, max_prompt_length=8).build(CONTEXT)
    assert (len(splits.train), len(splits.eval)) == (3, 2)
    assert list(splits.train.collate([2])["prompt_text"]) == ["2+1="]


def test_sequences_for_training_and_evaluation_are_built(files):
    splits = SFTFiles(**files, max_length=8).build(CONTEXT)
    assert (len(splits.train), len(splits.eval)) == (3, 2)
    assert CONTEXT.tokenizer.decode(splits.eval.collate([0])["input_ids"][0]) == "0+1=1<eos>"


def test_options_reach_the_data_set(files):
    splits = PromptFiles(**files, prompt_key="question", max_prompt_length=3, truncation="left").build(CONTEXT)
    assert splits.train[0]["prompt_text"] == "?"
    assert (splits.train.options.max_prompt_length, splits.train.options.truncation) == (3, "left")


@pytest.mark.parametrize("kind", [PromptFiles, SFTFiles])
def test_without_files_for_evaluation_there_is_no_such_split(files, kind):
    assert kind(train_files=files["train_files"]).build(CONTEXT).eval is None


@pytest.mark.parametrize(("kind", "limit"), [(PromptFiles, "max_prompt_length"), (SFTFiles, "max_length")])
def test_every_missing_file_and_wrong_length_is_found_when_described(files, kind, limit):
    with refusal(limit, "train_files[1]", "eval_files[0]", value="absent.csv"):
        kind(train_files=[*files["train_files"], "absent.parquet"], eval_files=["absent.csv"], **{limit: 0})
    with refusal("train_files"):
        kind(train_files=[])


def test_a_description_travels_to_another_process_as_it_is(files):
    described = PromptFiles(**files)
    assert pickle.loads(pickle.dumps(described)) == described
    assert isinstance(described.train_files, tuple)
