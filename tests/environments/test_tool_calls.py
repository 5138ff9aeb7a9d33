"""Tool calls are read by the format of the model's family; what cannot be read is told to the model."""

# ruff: noqa: E501, RUF001 - marks of DeepSeek have a full-width bar
from __future__ import annotations

import time

import pytest

from verl.environments.base import ToolError
from verl.environments.calculator import calculate
from verl.environments.tool_calls import ParseFault, ToolCall, parse_calls

NUMBER, TEXT = {"type": "number"}, {"type": "string"}
TOOLS = {
    "add": {"properties": {"a": NUMBER, "b": NUMBER}},
    "calc": {"properties": {"expression": TEXT}},
    "docs/read-file": {},
    "find": {
        "properties": {
            "text": TEXT, "maybe": {"anyOf": [TEXT, {"type": "null"}]}, "flag": {"type": "boolean"},
            "either": {"type": ["integer", "string"]}, "kind": {"$ref": "#/$defs/Kind"}, "any": {},
        },
        "$defs": {"Kind": {"enum": [1, 2]}},
    },
}  # fmt: skip
XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def parameter(name, value):
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", 'so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
         [("add", {"a": 1, "b": 2})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "calc", '
         '"arguments": {"expression": "1+1"}}</tool_call>', [("add", {"a": 1}), ("calc", {"expression": "1+1"})]),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"expression": "</tool_call>"}}</tool_call>',
         [("calc", {"expression": "</tool_call>"})]),
        ("hermes", '<think>I write <tool_call> and then {"name"</think><tool_call>{"name": "add", "arguments": {"a": 1}}'
         "</tool_call>", [("add", {"a": 1})]),
        ("hermes", '<think>or <tool_call>{"name": "add", "arguments": {}}</tool_call></think>it is 5', []),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"expression": "</think>"}}</tool_call>',
         [("calc", {"expression": "</think>"})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "calc", "arguments": '
         '{"expression": "</think>"}}</tool_call>', [("add", {}), ("calc", {"expression": "</think>"})]),
        ("hermes", "<think>after </tool_call> I stop</think>the answer is 5", []),
        ("hermes", "the answer is 5", []),
        ("hermes", '{"answer": 5}', []),
        ("hermes", "calc(1+1)", []),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "calc", "parameters": '
         '{"expression": "2;3"}}', [("add", {"a": 1}), ("calc", {"expression": "2;3"})]),
        ("llama", 'I call {"name": "add", "parameters": {"a": 1}} now', [("add", {"a": 1})]),
        ("llama", "it is 5", []),
        ("llama", 'he is {"name": "Bob"}', []),
        ("plain", "calc(12*34)", [("calc", {"expression": "12*34"})]),
        ("plain", "calc((1+2)*3)", [("calc", {"expression": "(1+2)*3"})]),
        ("plain", "add(1, b=2)\nadd(3)", [("add", {"a": 1, "b": 2}), ("add", {"a": 3})]),
        ("plain", "f(x) = 3", []),
        ("plain", "408", []),
        ("xml", XML.format("find", parameter("text", "75001") + parameter("maybe", "None") + parameter("flag", "True")),
         [("find", {"text": "75001", "maybe": None, "flag": True})]),
        ("xml", XML.format("find", parameter("either", "5") + parameter("kind", "2") + parameter("any", "[1]")),
         [("find", {"either": 5, "kind": 2, "any": [1]})]),
        ("xml", XML.format("find", parameter("either", "five") + parameter("text", "\n a </parameter> b\n")),
         [("find", {"either": "five", "text": "\n a </parameter> b\n"})]),
        ("xml", "<function=add></function>", [("add", {})]),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [("add", {"a": 1})]),
        ("glm", "<tool_call>add</tool_call>", [("add", {})]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", [("add", {"a": 1})]),
        ("harmony", '<|channel|>analysis<|message|>I add to=functions.add<|end|><|start|>assistant<|channel|>commentary '
         'to=functions.add <|constrain|>json<|message|>{"a": 1}', [("add", {"a": 1})]),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', [("add", {"a": 1})]),
        ("harmony", "<|channel|>final<|message|>to=functions.add is how", []),
        ("gemma", '<|tool_call>call:find{text:<|"|>a, b: {"c"}<|"|>,maybe:None,any:{k:[1,true]}}<tool_call|>',
         [("find", {"text": 'a, b: {"c"}', "maybe": None, "any": {"k": [1, True]}})]),
        ("lfm", "<|tool_call_start|>[find(text='it\\'s\\n, flag=1)', flag=True, any={\"k\": null}), add()]"
         "<|tool_call_end|>", [("find", {"text": "it's\n, flag=1)", "flag": True, "any": {"k": None}}), ("add", {})]),
        ("lfm", "<|tool_call_start|>[docs/read-file(file-name='a', größe=1)]<|tool_call_end|>",
         [("docs/read-file", {"file-name": "a", "größe": 1})]),
        ("gemma", "<|tool_call>call:docs/read-file{file-name:<|\"|>a<|\"|>}<tool_call|>",
         [("docs/read-file", {"file-name": "a"})]),
        ("harmony", " to=functions.docs/read-file<|channel|>commentary json<|message|>{}", [("docs/read-file", {})]),
        ("minimax", '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">75001</parameter>\n<parameter '
         'name="flag">true</parameter>\n</invoke>\n<invoke name="add">\n</invoke>\n</minimax:tool_call>',
         [("find", {"text": "75001", "flag": True}), ("add", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "123456789"}, {"name": "calc", '
         '"arguments": {"expression": "[1]</s>"}}]', [("add", {"a": 1}), ("calc", {"expression": "[1]</s>"})]),
        ("mistral", 'so [TOOL_CALLS]docs/read-file[ARGS]{"a": "}<b>"}[TOOL_CALLS]add[CALL_ID]1[ARGS]{"a": [1]}</s>',
         [("docs/read-file", {"a": "}<b>"}), ("add", {"a": [1]})]),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"any": [' + ", ".join(["[[{}]]"] * 40) + "]}",
         [("find", {"any": [[[{}]]] * 40})]),
        ("functiongemma", "<start_function_call>call:find{text:<escape>a, b: {c}<escape>,maybe:None,any:[1,true]}"
         "<end_function_call>", [("find", {"text": "a, b: {c}", "maybe": None, "any": [1, True]})]),
        ("lfm_unescaped", "<|tool_call_start|>[find(text='it's C:\\new', any=['a', None])]<|tool_call_end|>",
         [("find", {"text": "it's C:\\new", "any": ["a", None]})]),
    ],
)  # fmt: skip
def test_calls_are_read_in_order(style, text, expected):
    assert parse_calls(text, style, TOOLS) == [ToolCall(*call) for call in expected]


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("hermes", "<tool_call>{\"name\": \"add\"", "not followed by its end"),
        ("hermes", "<tool_call>{name: add}</tool_call>", "no JSON"),
        ("hermes", '<tool_call>[1]</tool_call>', "expected an object"),
        ("hermes", '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
         "no tool 'sub'; the tools are add, calc, docs/read-file, find"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "expected an object as arguments"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not a number in JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "not a number in JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "5000 digits"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"expression": "\\ud800"}}</tool_call>', "lone surrogate"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "lone surrogate"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"\\udfff": 1}}</tool_call>', "lone surrogate"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 1000 + "]" * 1000 + "}}</tool_call>",
         "nested deeper than 64"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}</tool_call>",
         "nested deeper than 64"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 99999 + "}</tool_call>", "nested deeper"),
        ("llama", '{"name": "add", "parameters": {"a": 1}', "no JSON"),
        ("llama", '{"name": "add", "parameters": {"a": ' + "[" * 1000 + "]" * 1000 + "}}", "nested deeper"),
        ("llama", '<|python_tag|>add.call(a=1)', "no JSON"),
        ("plain", "calc(1+2", "parenthesis is not closed"),
        ("plain", "add(1, 2, 3)", "takes 2 arguments, not 3"),
        ("plain", "add(1, a=2)", "gets the argument a twice"),
        ("plain", "add(1, x)", "expected literals"),
        ("plain", "add({[]: 1}, 2)", "expected literals"),
        ("plain", "add({1: 1}, 2)", "expected literals"),
        ("plain", "add({1, 2}, ...)", "expected literals"),
        ("plain", "add(1j, b'a')", "expected literals"),
        ("plain", "add('\\ud800', 1)", "expected literals"),
        ("plain", "add(**{'a': 1}, b=1)", "expected literals"),
        ("plain", f"add({'-' * 9999}1, 2)", "expected literals"),
        ("plain", f"add(0x{'f' * 5000}, 2)", "expected literals"),
        ("plain", "add(1e999, 2)", "expected literals"),
        ("plain", f"add({'[' * 90}{']' * 90}, 2)", "expected literals"),
        ("plain", f"add(1{'+1' * 9999}, 2)", "expected literals"),
        ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n", "not followed by its end"),
        ("xml", "<tool_call>{}</tool_call>", "expected <function=NAME>"),
        ("xml", XML.format("add", parameter("a", "one")), "'one' is not of type number"),
        ("xml", XML.format("add", "a=1"), "found 'a=1'"),
        ("xml", XML.format("find", parameter("any", "[" * 1000 + "]" * 1000) + "<parameter=text>"), "expected"),
        ("glm", "<tool_call>add <arg_key>a</arg_key></tool_call>", "expected a name"),
        ("deepseek", "<｜tool▁calls▁begin｜>add(1)<｜tool▁calls▁end｜>", "tool▁sep"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}", "not followed by its end"),
        ("harmony", " to=functions.add<|channel|>commentary json<|message|>{\"a\"", "no JSON"),
        ("harmony", " to=python<|channel|>commentary<|message|>{}", "no tool 'python'"),
        ("gemma", "<|tool_call>call:add{a:}<tool_call|>", "no JSON"),
        ("gemma", "<|tool_call>add{a:1}<tool_call|>", "expected call:NAME"),
        ("lfm", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>", "argument a cannot be read"),
        ("lfm", "<|tool_call_start|>add(a=1)<|tool_call_end|>", "expected a list"),
        ("lfm", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "expected argument=value"),
        ("lfm", "<|tool_call_start|>[ ]<|tool_call_end|>", "expected a call"),
        ("lfm", "<|tool_call_start|>[add(a=1)", "not followed by its end"),
        ("minimax", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1', "not followed by its end"),
        ("minimax", "<minimax:tool_call>add</minimax:tool_call>", 'expected <invoke name="NAME">'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}', "no JSON"),
        ("mistral", '[TOOL_CALLS]{"name": "add"}', "expected a list of calls"),
        ("mistral", "[TOOL_CALLS]add", "not followed by its end"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{a: 1}", "no JSON"),
        ("functiongemma", "<start_function_call>add{a:1}<end_function_call>", "expected call:NAME"),
        ("hermes", 'Yes.\n{"name": "add", "arguments": {}}\n</tool_call>', "</tool_call> ends a call that has no beg"),
        ("gemma", "call:add{a:1}<tool_call|>", "ends a call that has no beginning"),
        # another format than the configured one
        ("plain", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "in the format hermes"),
        ("llama", "<tool_call>add</tool_call>", "in the format glm"),
        ("harmony", "<|channel|>final<|message|><function=add></function>", "in the format xml"),
        ("xml", '<|python_tag|>{"name": "add", "parameters": {}}', "in the format llama"),
        ("hermes", '{"name": "add", "arguments": {"a": 1}}', "in the format llama"),
        ("hermes", '[TOOL_CALLS]add[ARGS]{"a": 1}', "in the format mistral"),
        ("gemma", "<|tool_call_start|>[add(a=1)]<|tool_call_end|>", "in the format lfm"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_what_was_meant_as_a_call_and_cannot_be_read_is_a_fault_with_its_reason(style, text, reason):
    (fault,) = parse_calls(text, style, TOOLS)
    assert isinstance(fault, ParseFault)
    assert reason in fault.reason
    (fault.reason + fault.text).encode()


def test_a_damaged_call_takes_none_of_its_neighbours_away():
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    found = parse_calls(f"{good}<tool_call>{{</tool_call>{good}<tool_call>{good}", "hermes", TOOLS)
    assert [type(call) for call in found] == [ToolCall, ParseFault, ToolCall, ParseFault, ToolCall]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["xml", "lfm", "plain"])  # all scan for calls of the other formats
def test_the_time_to_read_a_turn_does_not_grow_with_the_square_of_its_length(style):
    words = ["<tool_call>", "<function=add>", "<parameter=a>", "<|tool_call>call:add{", '<|"|>', "</tool_call>"]
    words += ["<|tool_call_start|>[add(a='", ", a=", '{"name": ', "to=functions.add<|message|>", "add(", "\n", " "]
    words += ['<invoke name="add">', "[TOOL_CALLS]", "]", "<start_function_call>call:add{", "<escape>"]
    words += ['<atem:invoke name="add">', "<｜tool▁call▁begin｜>", "<arg_key>", "}", "</parameter>", "\\", "'"]
    for word in words:
        begin = time.process_time()
        parse_calls(word * (20_000 // len(word)), style, TOOLS)
        parse_calls("<tool_call><function=add><parameter=a>" + word * (20_000 // len(word)), style, TOOLS)
        assert time.process_time() - begin < 20, word


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "9**9**9", "1/0", "x", "9" * 200, "1+", "10**8*10**8", "'a'*3"]
)
def test_the_calculator_computes_nothing_but_small_arithmetic(expression):
    with pytest.raises(ToolError):
        calculate(expression)
