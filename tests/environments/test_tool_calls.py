"""Tool calls are read by the format of the model's family; what cannot be read is told to the model."""

from __future__ import annotations

import pytest

from verl.environments.base import ToolError
from verl.environments.calculator import calculate
from verl.environments.tool_calls import ParseFault, ToolCall, format_of, parse_calls

TOOLS = {"add": ["a", "b"], "calc": ["expression"]}


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", 'so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
         [("add", {"a": 1, "b": 2})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "calc", '
         '"arguments": {"expression": "1+1"}}</tool_call>', [("add", {"a": 1}), ("calc", {"expression": "1+1"})]),
        ("hermes", "the answer is 5", []),
        ("hermes", "calc(1+1)", []),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "calc", "parameters": '
         '{"expression": "2"}}', [("add", {"a": 1}), ("calc", {"expression": "2"})]),
        ("llama", "it is 5", []),
        ("plain", "calc(12*34)", [("calc", {"expression": "12*34"})]),
        ("plain", "calc((1+2)*3)", [("calc", {"expression": "(1+2)*3"})]),
        ("plain", "add(1, b=2)\nadd(3)", [("add", {"a": 1, "b": 2}), ("add", {"a": 3})]),
        ("plain", "f(x) = 3", []),
        ("plain", "408", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_order(style, text, expected):
    assert parse_calls(text, style, TOOLS) == [ToolCall(*call) for call in expected]


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("hermes", "<tool_call>{\"name\": \"add\"", "not closed"),
        ("hermes", "<tool_call>{name: add}</tool_call>", "no JSON"),
        ("hermes", '<tool_call>[1]</tool_call>', "expected an object"),
        ("hermes", '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "no tool 'sub'; the tools are add, calc"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "expected an object as arguments"),
        ("llama", '{"name": "add", "parameters": {"a": 1}', "no JSON"),
        ("plain", "calc(1+2", "parenthesis is not closed"),
        ("plain", "add(1, 2, 3)", "takes 2 arguments, not 3"),
        ("plain", "add(1, x)", "expected literals"),
    ],
)  # fmt: skip
def test_what_was_meant_as_a_call_and_cannot_be_read_is_a_fault_with_its_reason(style, text, reason):
    (fault,) = parse_calls(text, style, TOOLS)
    assert isinstance(fault, ParseFault)
    assert reason in fault.reason


def test_the_format_is_read_from_the_chat_template():
    assert format_of("... <tool_call> ...") == "hermes"
    assert format_of('{"name": function name, "parameters": ...') == "llama"
    assert format_of(None) == "plain"
    assert format_of("... <tool_call> ...", "llama") == "llama"


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "9**9**9", "1/0", "x", "9" * 200, "1+", "10**8*10**8", "'a'*3"]
)
def test_the_calculator_computes_nothing_but_small_arithmetic(expression):
    with pytest.raises(ToolError):
        calculate(expression)
