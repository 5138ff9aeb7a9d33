"""Rows as other tools write them: nested columns of parquet, rendered prompts, content in parts, chats as JSON."""

import json
import logging
import sys

import numpy
import pytest
from refusals import refusal

from verl.component import BuildContext
from verl.data.base import PreferenceOptions
from verl.data.chat_template import _tell_of_template
from verl.data.files import EvaluatedPrompts, PromptFiles
from verl.data.preference_dataset import PreferenceDataset
from verl.data.readers import RowErrors
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.models.tiny import character_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default([]) | tojson }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "1+1="}


def call(**arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def chat(*calls):
    return [USER, {"role": "assistant", "content": "", "tool_calls": list(calls)}, {"role": "tool", "content": "2"}]


CHATS = [chat(call(text="a")), chat(call(number=1)), chat(call(text="b"), call(number=2))]
ROWS = [
    {"prompt": messages, "extra_info": info} for messages, info in zip(CHATS, ({"a": 1}, {"b": {"c": 2}}, {"b": {}}))
]
OPTIONS = {"chat_template": TEMPLATE, "max_prompt_length": 2000}


@pytest.fixture
def files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    return tmp_path


def texts(dataset):
    return [dataset[index]["prompt_text"] for index in range(len(dataset))]


def test_parquet_gives_the_prompts_and_columns_that_jsonl_of_the_same_rows_gives(files):
    jsonl, parquet = (
        RLHFDataset(files / name, character_tokenizer(), OPTIONS) for name in ("rows.jsonl", "rows.parquet")
    )
    assert texts(parquet) == texts(jsonl)
    assert "null" not in "".join(texts(parquet))
    assert [parquet[index]["extra_info"] for index in range(2)] == [{"a": 1}, {"b": {"c": 2}}]


def test_learned_conversations_of_parquet_are_those_of_jsonl(files):
    options = {"messages_key": "prompt", "chat_template": TEMPLATE, "max_length": 2000}
    jsonl, parquet = (
        SFTDataset(files / name, character_tokenizer(), options) for name in ("rows.jsonl", "rows.parquet")
    )
    assert [parquet[i]["input_ids"].tolist() for i in range(3)] == [jsonl[i]["input_ids"].tolist() for i in range(3)]


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_rows_of_the_datasets_package_are_those_of_jsonl(where, files, tmp_path):
    datasets = pytest.importorskip("datasets")
    jsonl = RLHFDataset(files / "rows.jsonl", character_tokenizer(), OPTIONS)
    rows = datasets.Dataset.from_list(ROWS)
    if where == "memory":
        found = RLHFDataset.from_rows(rows, character_tokenizer(), OPTIONS)
    else:
        from verl.data.hub import HubPrompts

        rows.save_to_disk(tmp_path / "saved")
        hub = HubPrompts(dataset=str(tmp_path / "saved"), **OPTIONS)
        found = hub.build(BuildContext(tokenizer=character_tokenizer())).train
    assert texts(found) == texts(jsonl)


def test_lists_that_pandas_made_arrays_of_are_lists():
    rows = [{"prompt": [USER], "extra_info": {"names": ["a"], "none": None}}]
    arrays = [
        {"prompt": numpy.array([USER], object), "extra_info": {"names": numpy.array(["a"], object), "none": None}}
    ]
    found, expected = (RLHFDataset.from_rows(x, character_tokenizer())[0] for x in (arrays, rows))
    assert found["prompt_text"] == expected["prompt_text"]
    assert found["extra_info"] == {"names": ["a"]}


def test_a_null_that_was_written_in_json_stays(tmp_path):
    rows = [{"prompt": chat(call(text=None)), "extra_info": {"limit": None}, "tools": None}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    dataset = RLHFDataset(tmp_path / "rows.jsonl", character_tokenizer(), OPTIONS)
    assert '{"text": null}' in dataset[0]["prompt_text"]
    assert dataset[0]["extra_info"] == {"limit": None}


def test_nulls_of_whole_columns_and_in_lists_of_parquet_stay(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "1+1=", "answer": None, "marks": [1, None]}, {"prompt": "2+2=", "answer": "4", "marks": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    dataset = RLHFDataset(tmp_path / "rows.parquet", character_tokenizer())
    assert [(dataset[i]["answer"], dataset[i]["marks"]) for i in range(2)] == [(None, [1, None]), ("4", None)]


def test_arguments_of_calls_that_are_json_text_as_in_openai_s_files_are_rendered_as_mappings():
    of_openai = {"type": "function", "function": {"name": "f", "arguments": '{"text": "a"}'}}
    rows = [{"prompt": chat(of_openai)}, {"prompt": CHATS[0]}]
    found = texts(RLHFDataset.from_rows(rows, character_tokenizer(), OPTIONS))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_calls_that_a_template_would_leave_out_are_refused(kind):
    options = {"messages_key": "prompt"} if kind is SFTDataset else {}
    with refusal("tool_calls", value="row 0"):
        kind.from_rows([{"prompt": CHATS[0]}], character_tokenizer(), options)


@pytest.mark.parametrize("form", ["{{ m.content }}<eos>", "{% generation %}{{ m.content }}<eos>{% endgeneration %}"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_turns_of_weight_zero_are_not_learned(form, mark):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" + form + "{% else %}{{ m.content }}"
    )
    template += "<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    said = [{"role": "assistant", "content": text} for text in ("3", "2")]
    rows, options = [{"messages": [USER, said[0] | mark, USER, said[1]]}], {"chat_template": template}
    row = SFTDataset.from_rows(rows, character_tokenizer(), options)[0]
    assert character_tokenizer().decode(row["input_ids"][row["loss_mask"]]) == "2<eos>"


def test_an_end_token_that_the_data_have_is_not_added_again():
    data = [{"prompt": "1+1=", "completion": "2<eos>", "chosen": "2<eos>", "rejected": "3"}]
    pair = PreferenceDataset.from_rows(data, character_tokenizer(), PreferenceOptions(), RowErrors())[0]
    row = SFTDataset.from_rows(data, character_tokenizer())[0]
    found = (row["input_ids"][row["loss_mask"]], pair["chosen"], pair["rejected"])
    assert [character_tokenizer().decode(x) for x in found] == ["2<eos>", "2<eos>", "3<eos>"]


def test_a_byte_order_mark_begins_a_file_of_windows(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1+1="}\r\n{"prompt": "2"}\r\n')
    assert texts(RLHFDataset(tmp_path / "rows.jsonl", character_tokenizer())) == ["1+1=", "2"]


@pytest.fixture
def digits_limited():
    """By Python's default, which libraries lift."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(4300)
    yield
    sys.set_int_max_str_digits(before)


def test_files_and_rows_of_another_form_are_refused(tmp_path, digits_limited):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": ' + "9" * 5000 + "}")
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([["1"], ["2"]], names=["prompt"] * 2), tmp_path / "a.parquet")
    for file in ("rows.jsonl", "a.parquet"):
        with refusal("data_files[0]", varies=True):
            RLHFDataset(tmp_path / file, character_tokenizer())
    with refusal("prompt_key", value="instruction"):
        SFTDataset.from_rows(
            [{"instruction": "Add.", "input": "1 2"}], character_tokenizer(), {"prompt_key": "instruction"}
        )
    for rows in (["1"], {"prompt": ["1"]}):
        with refusal("rows"):
            RLHFDataset.from_rows(rows, character_tokenizer())


# A second BOS


def with_bos():
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    special = [("<bos>", tokenizer.convert_tokens_to_ids("<bos>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos>:0 $A:0", pair="<bos>:0 $A:0 $B:1", special_tokens=special
    )
    return tokenizer


@pytest.mark.parametrize("prompt", ["<bos>1+1=", "1+1="])
def test_a_prompt_begins_with_one_bos_whether_it_was_written_or_not(prompt):
    tokenizer = with_bos()
    row = {"prompt": prompt, "completion": "2", "chosen": "2", "rejected": "3"}
    once = tokenizer("1+1=").input_ids
    assert RLHFDataset.from_rows([row], tokenizer)[0]["prompts"].tolist() == once
    assert SFTDataset.from_rows([row], tokenizer)[0]["input_ids"].tolist()[:-2] == once
    pairs = PreferenceDataset.from_rows([row], tokenizer, PreferenceOptions(), RowErrors())
    assert pairs[0]["prompts"].tolist() == once


def test_a_second_bos_that_the_author_wrote_stays():
    tokenizer = with_bos()
    prompts = RLHFDataset.from_rows([{"prompt": "1<bos>1="}, {"prompt": "<bos><bos>1"}], tokenizer)
    assert [tokenizer.decode(prompts[i]["prompts"]) for i in range(2)] == ["<bos>1<bos>1=", "<bos><bos>1"]


@pytest.mark.parametrize("form", ["text", "pair"])
def test_a_reward_model_reads_a_rendered_prompt_with_one_bos(form):
    from verl.protocol import DataProto
    from verl.rewards.reward_model import RewardTokenizer

    tokenizer = with_bos()
    rows = {"prompt_text": ["<bos>1+1=", "1+1="], "response_text": ["2", "2"]}
    read = RewardTokenizer(tokenizer, form, None, "error")(DataProto.from_dict(non_tensors=rows), len)
    assert read.ids[0] == read.ids[1]
    assert sum(token == tokenizer.bos_token_id for token in read.ids[0]) == 1


# Chats in other forms

PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}]


@pytest.mark.parametrize("prompt", [PARTS, json.dumps([USER]), json.dumps(PARTS)])
def test_content_in_text_parts_and_chats_as_json_text_are_taken(prompt):
    tokenizer, usual = character_tokenizer(), [USER]
    answer = [{"role": "assistant", "content": [{"type": "text", "text": "2"}]}]
    for dataset in (
        lambda x: RLHFDataset.from_rows([{"prompt": x}], tokenizer, OPTIONS)[0]["prompts"],
        lambda x: SFTDataset.from_rows([{"prompt": x, "completion": "2"}], tokenizer, {"chat_template": TEMPLATE})[0][
            "input_ids"
        ],
        lambda x: PreferenceDataset.from_rows(
            [{"prompt": x, "chosen": answer, "rejected": "3"}],
            tokenizer,
            PreferenceOptions(chat_template=TEMPLATE),
            RowErrors(),
        )[0]["prompts"],
    ):
        assert dataset(prompt).tolist() == dataset(usual).tolist()


def test_a_turn_that_only_calls_tools_needs_no_content():
    usual = chat(call(text="a"))
    for content in ({"content": None}, {}):
        turn = {"role": "assistant", "tool_calls": [call(text="a")], **content}
        prompts = [{"prompt": [usual[0], turn, usual[2]]}, {"prompt": usual}]
        one, other = texts(RLHFDataset.from_rows(prompts, character_tokenizer(), OPTIONS))
        assert one == other


@pytest.mark.parametrize(
    ("content", "value"),
    [(None, "content"), (5, "content"), ([{"type": "audio"}], "content"), ([{"type": "image"}], "image")],
)
def test_content_without_text_is_named(content, value):
    with refusal("prompt", value=value):
        RLHFDataset.from_rows([{"prompt": [{"role": "user", "content": content}]}], character_tokenizer(), OPTIONS)


def test_json_that_is_no_chat_stays_a_text_prompt():
    prompts = ['[1, 2, "role"]', '[{"role"', "[]", '[{"a": "role"}]']
    assert texts(RLHFDataset.from_rows([{"prompt": x} for x in prompts], character_tokenizer())) == prompts


def test_text_prompts_beside_a_chat_template_are_told_once_and_rendered_ones_are_not(tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    files = (str(tmp_path / "rows.jsonl"),)

    def told(prompt, template, kind=PromptFiles):
        caplog.clear()
        _tell_of_template.cache_clear()
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        tokenizer = character_tokenizer()
        tokenizer.chat_template = template
        with caplog.at_level(logging.WARNING):
            kind(train_files=files, eval_files=files).build(BuildContext(tokenizer=tokenizer))
        return caplog.text.count("chat template")

    assert told("1+1=", TEMPLATE) == 1
    assert told("1+1=", None) == told([USER], TEMPLATE) == told("1+1=<eos>", TEMPLATE) == 0
    assert told("1+1=", TEMPLATE, EvaluatedPrompts) == 0  # where they are wanted
