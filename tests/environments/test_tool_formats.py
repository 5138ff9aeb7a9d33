"""Calls that a chat template renders are read back, and results of tools follow them as it renders them.

The templates are those of the package trl, which is not among the requirements of verl: without it these cases are
skipped.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from environments.episodes import byte_level_tokenizer

from verl.data.chat_template import ChatTemplate
from verl.environments.base import EnvironmentDescription
from verl.environments.observation_tokens import ObservationEncoder, check_template, text_between
from verl.environments.tool_calls.parse import ToolCall, parse_calls
from verl.environments.tool_calls.round_trip import format_of
from verl.errors import ConfigError

PARAMETERS = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "what is looked for"},
        "limit": {"type": "integer", "description": "how many"},
        "exact": {"type": "boolean", "description": "whether exactly"},
        "factor": {"anyOf": [{"type": "number"}, {"type": "null"}], "description": "weight"},
        "filters": {"type": "object", "description": "more"},
        "names": {"type": "array", "items": {"type": "string"}, "description": "in these"},
    },
    "required": [],
}
TOOLS = {"search_docs": PARAMETERS, "count_words": PARAMETERS}
TURNS = {
    "one": [("search_docs", {"query": "weather in Paris", "limit": 3})],
    "two": [("search_docs", {"query": "a"}), ("count_words", {"limit": 0, "exact": True, "factor": None})],
    "nested": [("search_docs", {"filters": {"a": {"b": [1, {"c": "d: [e], f=2)"}]}, "on": False}, "names": ["x'y"]})],
    "quotes": [("count_words", {"query": 'it\'s "quoted", `so`, C:\\temp\\new and \\"this\\"'})],
    "lines": [("count_words", {"query": "one\n\ttwo\n\nthree <b>&amp;</b>"})],
    "plain words": [("count_words", {"query": "None", "limit": -1, "factor": 0.125})],
    "empty": [("count_words", {})],
    "scripts": [("count_words", {"query": "größer → 数える 🙂"})],
}  # fmt: skip
FORMATS = {
    "hermes": ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), "glm": ("glm4moe",), "harmony": ("gptoss",),
    "xml": ("qwen3_5", "qwen3_6", "qwen3_8", "nemotron_3"), "deepseek": ("deepseekv3",), "atem": ("muse_glimmer",),
    "gemma": ("gemma4", "diffusion_gemma"), "lfm": ("lfm2_v2", "lfm2_2_5_vl"), "llama": ("llama3_1", "llama3_2"),
    "lfm_unescaped": ("lfm2_2_5", "lfm2_2_5_v2"),
    "refused": ("deepseek_r1_distill", "lfm2", "lfm2_training"),
    "plain": ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "llama3", "llava_next", "phi3", "phi3_5",
              "qwen2_5_vl", "smolvlm"),
}  # fmt: skip


def templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    origin = None if spec is None else spec.origin
    return [] if origin is None else sorted((Path(origin).parent / "chat_templates").glob("*.jinja"))


def expected_format(name: str) -> Any:
    name = name.removesuffix("_training") if name != "lfm2_training" else name
    known = [(len(begin), style) for style, names in FORMATS.items() for begin in names if name.startswith(begin)]
    return max(known)[1]


def renders_calls(name: str) -> bool:
    return expected_format(name) not in ("plain", "refused") and not name.endswith("_training")


CASES = [pytest.param(path, id=path.stem) for path in templates()] or [
    pytest.param(None, marks=pytest.mark.skip(reason="the package trl, which has the templates, is not installed"))
]


@pytest.fixture(scope="module")
def tokenizer():
    found = byte_level_tokenizer(bos_token="<BOS>", eos_token="<EOS>")
    found.add_tokens(["<|im_end|>", "<|observation|>", "<|call|>", "<|tool_response>"], special_tokens=True)
    return found


def messages_of(calls, content=""):
    made = [
        {"id": f"abcdefg{i:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": content, "tool_calls": made}]


def turn_of(chat, calls, content=""):
    functions = [{"name": name, "description": "d", "parameters": schema} for name, schema in TOOLS.items()]
    tools = [{"type": "function", "function": function} for function in functions] if chat.reads_tools else None
    text = chat.render(messages_of(calls, content), "here", reply_follows=False, tools=tools)
    return text[text.rfind("QUESTION") + len("QUESTION") :]


@pytest.mark.first_rows(24)
@pytest.mark.parametrize("path", CASES)
def test_calls_that_a_template_renders_are_read_back_or_the_template_is_refused_at_the_start(path, tokenizer):
    chat, expected = ChatTemplate(tokenizer, path.read_text()), expected_format(path.stem)
    if expected == "refused":
        with pytest.raises(
            ConfigError, match=r"renders no calls of the assistant.*Set environment.tool_format to one of hermes"
        ):
            format_of(chat)
        return
    style = format_of(chat)
    assert style == expected
    if style == "plain":
        return
    for name, calls in TURNS.items():
        for content in ("", "First I look it up."):
            many = len(calls) if style not in ("llama", "harmony") else 1  # their models write one call in a turn
            text = turn_of(chat, calls[:many], content)
            assert parse_calls(text, style, TOOLS) == [ToolCall(*call) for call in calls[:many]], name
    damaged = turn_of(chat, TURNS["one"])
    damaged = damaged[: damaged.index("Paris")]
    assert [type(call).__name__ for call in parse_calls(damaged, style, TOOLS)] == ["ParseFault"]


def test_most_templates_with_tools_are_supported():
    if not templates():
        pytest.skip("the package trl, which has the templates, is not installed")
    with_tools = [path.stem for path in templates() if "tool_calls" in path.read_text()]
    kinds = Counter(expected_format(name) for name in with_tools)
    assert kinds["refused"] <= 5
    assert kinds["plain"] == 0


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("path", [case for case in CASES if case.id is None or renders_calls(str(case.id))])
def test_results_of_tools_follow_a_call_as_the_template_renders_them(path, number, tokenizer):
    chat, expected = ChatTemplate(tokenizer, path.read_text()), expected_format(path.stem)
    names = list(TOOLS)[:number]
    answers = [{"role": "tool", "name": name, "content": f'RESULT "{i}"\nof {name}'} for i, name in enumerate(names)]
    encoder = ObservationEncoder(tokenizer, chat, [tokenizer.eos_token_id], 999, expected)
    found = tokenizer.decode(encoder.encode(answers, is_chat=True, last=None))
    many = number if expected not in ("llama", "harmony") else 1
    whole = messages_of([(name, {}) for name in names[:many]])
    for i, answer in enumerate(answers):
        whole.append({**answer, "tool_call_id": f"abcdefg{min(i, many - 1):02}"})
    rendered = chat.render(whole, "here", reply_follows=True)
    assert rendered.endswith(found)
    turn = rendered[rendered.rfind("QUESTION") : len(rendered) - len(found)]
    assert len(parse_calls(turn, expected, TOOLS)) == many  # the calls end right before


def test_the_token_with_which_the_model_ended_its_call_is_not_repeated(tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{{ m.content }}{% else %}<{{ m.role }}>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    stop = tokenizer.convert_tokens_to_ids("<|observation|>")
    encoder = ObservationEncoder(tokenizer, ChatTemplate(tokenizer, template), [stop], 99, "glm")
    answer = [{"role": "tool", "name": "f", "content": "5"}]
    assert tokenizer.decode(encoder.encode(answer, is_chat=True, last=stop)) == "5<assistant>"
    assert tokenizer.decode(encoder.encode(answer, is_chat=True, last=0)) == "<|observation|>5<assistant>"


CALLS = {  # how a template writes the calls of a turn
    "minimax": '\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments|items %}<parameter name="{{ k }}">{{ v if v is string else '
    "v|tojson }}</parameter>\n"
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "mistral": '[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function|tojson)[:-1] }}, "id": "{{ c.id[-9:] }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]",
    "mistral, a mark each": "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments|tojson }}{% endfor %}",
    "functiongemma": "{% macro f(x) %}{% if x is string %}<escape>{{ x }}<escape>{% elif x is boolean %}"
    "{{ 'true' if x else 'false' }}{% elif x is mapping %}{ {%- for k, v in x|items %}{{ k }}:{{ f(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}}{% elif x is iterable %}[{% for v in x %}{{ f(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ x }}{% endif %}{% endmacro %}{% for c in m.tool_calls %}"
    "<start_function_call>call:{{ c.function.name }}{{ f(c.function.arguments) }}<end_function_call>{% endfor %}",
}


@pytest.mark.parametrize("name", CALLS)
def test_formats_of_which_no_template_is_at_hand_are_recognised_and_read(name, tokenizer):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}" + CALLS[name] + "{% endif %}<EOS>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{# tools #}"
    )
    chat, style = ChatTemplate(tokenizer, template), name.partition(",")[0]
    check_template(EnvironmentDescription(), chat, has_chats=True)
    assert format_of(chat) == style
    for calls in TURNS.values():
        assert parse_calls(turn_of(chat, calls, "First."), style, TOOLS) == [ToolCall(*call) for call in calls]
    encoder = ObservationEncoder(tokenizer, chat, [tokenizer.eos_token_id], 99, style)
    answer = [{"role": "tool", "name": "search_docs", "content": "5"}]
    assert tokenizer.decode(encoder.encode(answer, is_chat=True, last=tokenizer.eos_token_id)) == (
        "<tool>5<EOS><assistant>"
    )


HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': "
    "c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# tools #}"
)


@pytest.mark.parametrize(
    ("template", "settings", "said"),
    [
        (HERMES, {}, None),
        (
            HERMES.replace("tojson", "string"),
            {},
            "one call rendered as .* Set another data.chat_template, or environment.tool_format",
        ),
        (HERMES, {"tool_format": "xml"}, "tool_format is xml, .* Set environment.tool_format=auto"),
        (HERMES.replace("m.tool_calls", "m.others"), {}, "renders no calls of the assistant"),
        (HERMES.replace("m.tool_calls", "m.others"), {"tool_format": "hermes"}, None),
        (HERMES.replace("m.content", "m.content[:40]"), {"history": "rerender"}, "Set environment.history=append"),
        (HERMES, {"history": "rerender"}, None),
        (HERMES, {"tool_format": "plain"}, None),
        ("{{ raise_exception('no ' ~ messages[-1].role) if messages[-1].role == 'tool' }}" + HERMES, {}, "no tool"),
    ],
    ids=range(9),
)
def test_a_template_that_would_lose_calls_or_results_is_refused(template, settings, said, tokenizer):
    options, chat = EnvironmentDescription(**settings), ChatTemplate(tokenizer, template)
    if said is None:
        check_template(options, chat, has_chats=True)
        return
    with pytest.raises(ConfigError, match=said):
        check_template(options, chat, has_chats=True)


def test_names_of_tools_that_no_template_can_hold_are_replaced(tokenizer):
    chat = ChatTemplate(tokenizer, HERMES)
    found = text_between(chat, "hermes", [{"role": "tool", "name": 'a"<tool_call>\ud800'}])
    assert found.pieces == ["<tool>", "<assistant>"]
