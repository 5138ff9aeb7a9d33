"""Chats: system prompts, templates that refuse, and which tokens of a conversation are learned."""

import copy
import json

import pytest
import torch
from refusals import refusal, refused

from verl.data.base import PromptOptions
from verl.data.chat_template import template_in_use
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
USER, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add."}
CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>\\n' + m.content + '<eos>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
NO_SYSTEM += "{{ m.content }}{% endfor %}"
NO_OTHER = NO_SYSTEM.replace("'system'", "'chatgpt'")
FORGETS = (  # earlier turns lose what they said, as templates do that strip thoughts
    "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def prompts(rows, **config):
    return RLHFDataset.from_rows(rows, TOKENIZER, config)


def conversations(*chats, **config):
    return SFTDataset.from_rows([{"messages": list(chat)} for chat in chats], TOKENIZER, config)


def learned(dataset, index=0):
    row = dataset[index]
    return TOKENIZER.decode(row["input_ids"][row["loss_mask"]])


def test_a_system_prompt_opens_chats_and_makes_chats_of_texts_but_replaces_no_system_message():
    own = {"role": "system", "content": "Sum."}
    dataset = prompts([{"prompt": [USER]}, {"prompt": "1+1="}, {"prompt": [own, USER]}], system_prompt="Add.")
    chat = "<system>Add.<eos><user>1+1=<eos><assistant>"
    assert [dataset[index]["prompt_text"] for index in range(3)] == [chat, chat, chat.replace("Add", "Sum")]
    roles = [[message["role"] for message in dataset[index]["prompt_messages"]] for index in range(3)]
    assert roles == [["system", "user"]] * 3


@pytest.mark.parametrize("template", [None, MARKED], ids=["plain", "marked"])
def test_a_completion_of_messages_is_rendered_with_its_prompt_and_its_assistant_turns_alone_are_learned(template):
    before, after = [USER, ANSWER], [USER, {**ANSWER, "content": [{"type": "text", "text": "3"}]}]
    config = (
        {} if template is None else {"chat_template": template + "{% if add_generation_prompt %}<assistant>{% endif %}"}
    )
    dataset = SFTDataset.from_rows([{"prompt": [*before, USER], "completion": after[1:]}], TOKENIZER, config)
    whole = conversations([*before, USER, {**ANSWER, "content": "3"}], **config)
    assert torch.equal(dataset[0]["input_ids"], whole[0]["input_ids"])
    assert learned(dataset) == "3<eos>"
    as_text = {"prompt": json.dumps([*before, USER]), "completion": json.dumps(after[1:])}
    assert torch.equal(SFTDataset.from_rows([as_text], TOKENIZER, config)[0]["input_ids"], dataset[0]["input_ids"])
    with refusal("completion", value="row 0"):
        SFTDataset.from_rows([{"prompt": "1+1=", "completion": after[1:]}], TOKENIZER)
    with refusal("messages", value="row 0"):
        SFTDataset.from_rows([{"prompt": [USER], "completion": [USER]}], TOKENIZER, config)


def test_the_messages_of_a_prompt_travel_with_it_and_texts_have_none():
    dataset = prompts([{"prompt": [USER]}, {"prompt": "1+1="}])
    assert list(dataset.collate([1, 0])["prompt_messages"]) == [None, [USER]]
    assert "prompt_messages" not in prompts([{"prompt": "1+1="}]).columns


def test_a_template_without_the_roles_used_is_named_with_row_roles_and_its_error(caplog):
    rows = [{"prompt": [USER]}, {"prompt": [SYSTEM, USER]}]
    with refusal("chat_template", value="system, user at row 1: no system role"):
        prompts(rows, chat_template=NO_SYSTEM)
    assert len(prompts(rows, chat_template=NO_SYSTEM, on_bad_row="skip")) == 1
    assert "1 of 2 rows are left out: chat_template " in caplog.text


@pytest.mark.parametrize("name", [None, "default"])
def test_a_tokenizer_may_have_several_templates_by_name(name):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    options = {"chat_template": name}
    row = SFTDataset.from_rows([{"messages": [USER, ANSWER]}], tokenizer, options)[0]
    assert tokenizer.decode(row["input_ids"][row["loss_mask"]]) == "2<eos>"
    if name is None:
        with_tools = RLHFDataset.from_rows([{"prompt": [USER], "tools": [{"a": 1}]}], tokenizer, options)
        assert with_tools[0]["prompt_text"].startswith('[{"a": 1}]')


@pytest.mark.parametrize("template", ["messages.jinja", "", "{# messages #}"])
def test_a_template_that_writes_no_messages_is_refused(template):
    with refusal("chat_template", varies=True):
        prompts([{"prompt": [USER]}], chat_template=template)
    with refusal("chat_template", varies=True):
        conversations([USER, ANSWER], chat_template=template)


def test_every_turn_of_the_assistant_is_learned_with_its_end_token_and_nothing_else():
    more = {"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}
    dataset = conversations([SYSTEM, USER, ANSWER, *more], [USER, ANSWER])
    assert learned(dataset) == "2<eos>7<eos>"
    assert TOKENIZER.decode(dataset[0]["input_ids"]) == (
        "<system>Add.<eos><user>1+1=<eos><assistant>2<eos><user>3+4=<eos><assistant>7<eos>"
    )
    batch = dataset.collate([0, 1]).check(strict=True)
    assert batch["loss_mask"].sum(dim=1).tolist() == [4, 2]


def test_what_stands_before_an_answer_is_what_generation_starts_from():
    row = conversations([USER, ANSWER], system_prompt="Add.")[0]
    prompt = prompts([{"prompt": [USER]}], system_prompt="Add.")[0]["prompts"]
    assert row["input_ids"][~row["loss_mask"]].tolist() == prompt.tolist()


def test_whitespace_that_a_template_puts_after_the_end_token_is_not_learned():
    dataset = conversations([USER, ANSWER, USER, ANSWER], chat_template=CHATML)
    assert learned(dataset) == "2<eos>2<eos>"
    assert TOKENIZER.decode(dataset[0]["input_ids"]).endswith("<eos>\n")


# As Qwen3's: earlier turns lose their thoughts, and the last one has empty ones where it has none.
QWEN = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last and '~' not in m.content %}~~"
    "{% endif %}{{ m.content if loop.last or m.role != 'assistant' else m.content.split('~')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_turns_that_a_template_rewrites_once_others_follow_are_learned_each_as_the_last_one(caplog):
    thinks = {"role": "assistant", "content": "~1~3"}
    chats = [[USER, ANSWER], [SYSTEM, USER, thinks, USER, ANSWER, USER, {**thinks, "weight": 0}, USER, thinks, USER]]
    dataset = conversations(*chats, chat_template=QWEN, on_bad_row="error")
    assert [learned(dataset, index) for index in range(len(dataset))] == [
        "~~2<eos>", "~1~3<eos>", "~~2<eos>", "~1~3<eos>"
    ]  # fmt: skip
    texts = [TOKENIZER.decode(dataset[index]["input_ids"]) for index in range(1, 4)]
    start = "<system>Add.<eos><user>1+1=<eos><assistant>"
    assert texts[:2] == [f"{start}~1~3<eos>", f"{start}3<eos><user>1+1=<eos><assistant>~~2<eos>"]
    assert texts[2].count("~") == 2
    rows = [{"prompt": [USER], "completion": [ANSWER, USER, ANSWER]}]
    with refusal("chat_template", value="message 1 at row 0"):  # a completion is one row
        SFTDataset.from_rows(rows, TOKENIZER, {"chat_template": FORGETS})


def test_a_conversation_that_begins_with_the_assistant_is_learned_where_the_template_marks_its_turns():
    chat = [ANSWER, USER, ANSWER]
    with refusal("messages", value="row 0"):
        conversations(chat)
    assert learned(conversations([{**ANSWER, "weight": 0}, USER, ANSWER])) == "2<eos>"
    assert learned(conversations(chat, chat_template=MARKED)) == "2<eos>2<eos>"


def test_a_template_that_marks_the_assistants_part_is_asked():
    assert learned(conversations([USER, ANSWER, USER, ANSWER], chat_template=MARKED)) == "2<eos>2<eos>"


@pytest.mark.parametrize("bad", [None, "text", [], [{"role": "user"}], [{"role": "assistant", "content": "\ud83d"}]])
def test_what_is_no_conversation_is_a_bad_row(bad, caplog):
    rows = [{"messages": [USER, ANSWER]}, {"messages": bad}]
    with refusal("messages", value="row 1"):
        SFTDataset.from_rows(rows, TOKENIZER, {"messages_key": "messages"})
    assert len(SFTDataset.from_rows(rows, TOKENIZER, {"messages_key": "messages", "on_bad_row": "skip"})) == 1
    assert "1 of 2 rows are left out" in caplog.text


def test_a_conversation_cut_on_the_left_learns_what_is_left_but_its_first_token():
    long = {"role": "assistant", "content": "12345"}
    row = conversations([USER, long, USER, ANSWER], max_length=12, truncation="left")[0]
    assert len(row["input_ids"]) == 12
    assert not row["loss_mask"][0]
    assert learned(conversations([USER, long, USER, ANSWER], max_length=12, truncation="left")).endswith("2<eos>")


def test_answers_are_found_in_the_tokens_of_a_byte_level_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    bytewise.train_from_iterator(["user assistant one two é 😀 the answer"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", chat_template=CHATML)
    chat = [USER, {"role": "assistant", "content": " é 😀\nthe answer "}, USER, {"role": "assistant", "content": "two"}]
    row = SFTDataset.from_rows([{"messages": chat}], tokenizer, {"messages_key": "messages"})[0]
    assert tokenizer.decode(row["input_ids"][row["loss_mask"]]) == " é 😀\nthe answer <eos>two<eos>"


# Variables of a template, and templates by name or file

# As Qwen3's: an answer without thoughts is announced by empty ones, where that is asked for.
THINKS = """
   {%- macro role(name) %}<{{ name }}{{ '/' + mood if mood }}>{% endmacro %}
   {%- for m in messages %}{{ role(m.role) + m.content + '<eos>' }}{% endfor %}
   {%- if add_generation_prompt %}{{ role('assistant') }}
       {%- if enable_thinking is defined and enable_thinking is false %}{{ '()' }}{% endif %}{% endif %}
"""


@pytest.mark.parametrize("template", [THINKS, THINKS.lstrip()], ids=["indented", "bare"])
def test_variables_of_a_template_are_what_transformers_makes_of_them(template):
    values = {"enable_thinking": False, "mood": 'it\'s \n "é" {{ x }}'}
    config = {"chat_template": template, "chat_template_kwargs": values}
    chat = {"conversation": [USER], "chat_template": template, "tokenize": False, "add_generation_prompt": True}
    assert prompts([{"prompt": [USER]}], **config)[0]["prompt_text"] == TOKENIZER.apply_chat_template(**chat, **values)
    assert prompts([{"prompt": [USER]}], chat_template=template)[0]["prompt_text"].endswith("<assistant>")
    assert learned(conversations([USER, ANSWER], chat_template=template, chat_template_kwargs={"mood": None})) == (
        "2<eos>"
    )
    source = template_in_use(TOKENIZER, PromptOptions(**config))
    chat |= {"chat_template": source, "enable_thinking": True}  # who renders by the saved template may ask otherwise
    assert TOKENIZER.apply_chat_template(**chat).endswith(">")


def test_a_template_is_taken_by_its_name_or_from_a_file(tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML)
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = {"default": MARKED, "other": THINKS}
    rows = [{"prompt": [USER]}]
    for given in (CHATML, str(tmp_path / "own.jinja")):
        assert prompts(rows, chat_template=given)[0]["prompt_text"] == "<user>\n1+1=<eos>\n<assistant>\n"
    options = {"chat_template": "other", "chat_template_kwargs": {"enable_thinking": False}}
    assert RLHFDataset.from_rows(rows, tokenizer, options)[0]["prompt_text"].endswith("<assistant>()")
    with refusal("chat_template_kwargs", value="default, other"):
        RLHFDataset.from_rows(rows, tokenizer, {"chat_template_kwargs": {"enable_thinking": False}})


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "True"])
def test_a_variable_that_the_template_does_not_read_or_that_is_no_setting_is_refused_by_name(name):
    with refusal(f"chat_template_kwargs.{name}", value="False"):
        prompts([{"prompt": [USER]}], chat_template=THINKS, chat_template_kwargs={name: False})


def test_sharegpts_conversations_are_chats():
    turns = [{"from": "system", "value": "Add."}, {"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    found = SFTDataset.from_rows([{"conversations": [*turns, *turns[1:]]}], TOKENIZER, {})
    expected = conversations([SYSTEM, USER, ANSWER, USER, ANSWER])
    assert all(torch.equal(found[0][name], x) for name, x in expected[0].items())
    with refusal("chat_template", value="chatgpt"):  # a role that no template is known to have stays as it is
        SFTDataset.from_rows(
            [{"conversations": [*turns, {"from": "chatgpt", "value": ""}]}], TOKENIZER, {"chat_template": NO_OTHER}
        )


# A chat that ends with the assistant, and tools


def test_a_chat_that_ends_with_the_assistant_is_refused_since_its_answer_would_stand_in_the_prompt():
    chats = [{"prompt": [USER]}, {"prompt": [USER, ANSWER]}]
    with refusal("final_assistant", value="row 1"):
        prompts(chats)
    assert [row["prompt_ids"] for row in prompts(chats, on_bad_row="skip")] == [0]


@pytest.mark.parametrize("how", ["drop", "answer"])
def test_the_last_words_of_the_assistant_are_taken_out_of_the_prompt(how):
    earlier = {"role": "assistant", "content": "11"}
    chats = [[USER, ANSWER], [USER], [USER, earlier, USER, ANSWER, {"role": "assistant", "content": "so 2"}]]
    dataset = prompts([{"prompt": chat} for chat in chats], final_assistant=how)
    rows = [dataset[index] for index in range(3)]
    assert rows[0]["prompt_text"] == rows[1]["prompt_text"] == "<user>1+1=<eos><assistant>"
    assert rows[2]["prompt_text"] == "<user>1+1=<eos><assistant>11<eos><user>1+1=<eos><assistant>"
    assert [row["prompt_messages"][-1] for row in rows] == [USER] * 3
    assert [row.get("answer", "absent") for row in rows] == (["absent"] * 3 if how == "drop" else ["2", None, "so 2"])


def no_template():
    bare = character_tokenizer()
    bare.chat_template = None
    return bare


ANSWERED = {"prompt": [USER, ANSWER], "answer": "3"}
test_what_no_template_can_make_a_row_of_is_refused = refused(
    ("chat_template", None, lambda: RLHFDataset.from_rows([{"prompt": "1"}], no_template(), {"system_prompt": "Add."})),
    ("chat_template", "row 0", lambda: RLHFDataset.from_rows([{"prompt": [USER]}], no_template())),
    ("messages", "row 1", lambda: conversations([USER, ANSWER], [USER])),
    ("messages", "row 1", lambda: conversations([USER, ANSWER], [USER], chat_template=MARKED)),
    ("max_length", 5, lambda: conversations([USER, ANSWER], max_length=5, truncation="right")),
    ("final_assistant", "answer", lambda: prompts([ANSWERED], final_assistant="answer")),
)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}{% endif %}" + (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_reach_the_template(tools, tmp_path):
    rows = [{"prompt": [USER], "tools": tools}, {"prompt": [USER], "tools": None}, {"prompt": [USER], "tools": []}]
    dataset = prompts(rows, chat_template=WITH_TOOLS)
    texts = [dataset[index]["prompt_text"] for index in range(3)]
    assert texts[0].startswith('<tools>[{"type": "function", "function": {"name": "add"')
    assert texts[1] == texts[2] == "<user>1+1=<eos><assistant>"
    sft = SFTDataset.from_rows(
        [{"messages": [USER, ANSWER], "tools": tools}],
        TOKENIZER,
        {"messages_key": "messages", "chat_template": WITH_TOOLS},
    )
    assert TOKENIZER.decode(sft[0]["input_ids"]).startswith('<tools>[{"type": "function"')
    assert learned(sft) == "2<eos>"


@pytest.mark.parametrize("tools", [[TOOL], "[1,", {"name": "add"}], ids=["not read", "no JSON", "no list"])
def test_tools_that_no_template_reads_or_that_are_none_are_refused_by_name(tools):
    with refusal("tools", value="row 0"):
        prompts([{"prompt": [USER], "tools": tools}])
    with refusal("tools", value="row 0"):
        SFTDataset.from_rows([{"messages": [USER, ANSWER], "tools": tools}], TOKENIZER, {"messages_key": "messages"})


# Tokenizers that put special tokens around a text


@pytest.mark.parametrize(
    "layout", ["<bos>:0 $A:0 <eos>:0", "<bos>:0 $A:0 <sep>:0 <eos>:0", "$A:0 <eos>:0", "<bos>:0 $A:0"]
)
def test_no_token_that_a_tokenizer_puts_after_a_text_ends_a_prompt(layout):
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>", "sep_token": "<sep>"})
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", "<sep>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=layout, special_tokens=special)
    begin = "<bos>" if layout.startswith("<bos>") else ""
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "5<eos>", "completion": "6"}]
    prompts = RLHFDataset.from_rows(rows, tokenizer, {"prompt_key": "prompt"})
    assert [tokenizer.decode(prompts[i]["prompts"]) for i in range(2)] == [f"{begin}1+1=", f"{begin}5<eos>"]
    answers = SFTDataset.from_rows(rows, tokenizer, {"prompt_key": "prompt"})
    assert tokenizer.decode(answers[0]["input_ids"]) == f"{begin}1+1=2<eos>"
