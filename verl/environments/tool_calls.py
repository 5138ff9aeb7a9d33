"""Parser of tool calls in a turn, for the formats of several model families.

hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen 2.5, Qwen 3, Hermes
llama    {"name": "add", "parameters": {"a": 1}}                           Llama 3, after <|python_tag|> or alone
plain    add(1, 2)                                                         a line of its own; the built-in model
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["auto", "hermes", "llama", "plain"]


@dataclass(frozen=True)
class ToolCall:
    """A parsed call.

    Attributes:
        arguments: by name; positional arguments of the format `plain` get the names of the tool's parameters.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParseFault:
    """A call that could not be parsed.

    Attributes:
        text: of the call.
        reason: shown to the model.
    """

    text: str
    reason: str


def format_of(template: str | None, chosen: ToolFormat = "auto") -> ToolFormat:
    """The format that a chat template uses."""
    if chosen != "auto":
        return chosen
    if template is None:
        return "plain"
    if "<tool_call>" in template:
        return "hermes"
    if "python_tag" in template or '"parameters"' in template:
        return "llama"
    return "plain"


def parse_calls(text: str, style: ToolFormat, tools: Mapping[str, Sequence[str]]) -> list[ToolCall | ParseFault]:
    """The calls in a turn, in order; empty if the turn is an answer.

    Args:
        text: of a turn that ended by itself.
        tools: names of the tools, each with the names of its parameters.
    """
    if not tools:
        return []
    if style == "hermes":
        return _hermes(text, tools)
    if style == "llama":
        return _llama(text, tools)
    return _plain(text, tools)


_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def _hermes(text: str, tools: Mapping[str, Sequence[str]]) -> list[ToolCall | ParseFault]:
    found: list[ToolCall | ParseFault] = []
    for body, end in _HERMES.findall(text):
        if not end:
            found.append(ParseFault(body, "a <tool_call> is not closed by </tool_call>"))
        else:
            found.append(_of_json(body, "arguments", tools))
    return found


def _llama(text: str, tools: Mapping[str, Sequence[str]]) -> list[ToolCall | ParseFault]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not (text.lstrip().startswith("<|python_tag|>") or body.startswith("{")):
        return []
    return (
        [_of_json(part, "parameters", tools) for part in body.split(";") if part.strip()]
        if _is_several(body)
        else [_of_json(body, "parameters", tools)]
    )


def _is_several(body: str) -> bool:
    """Whether the text is several calls, separated by semicolons outside of string literals."""
    try:
        json.loads(body)
    except ValueError:
        return ";" in body
    return False


def _of_json(body: str, key: str, tools: Mapping[str, Sequence[str]]) -> ToolCall | ParseFault:
    try:
        call = json.loads(body.strip())
    except ValueError as error:
        return ParseFault(body, f"no JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ParseFault(body, "expected an object with a text `name`")
    arguments = call.get(key, call.get("arguments", call.get("parameters", {})))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ParseFault(body, f"{key} are not JSON ({error})")
    if not isinstance(arguments, dict):
        return ParseFault(body, f"expected an object as {key}")
    return _known(call["name"], arguments, body, tools)


_CALL = re.compile(r"\s*([A-Za-z_]\w*)\((.*)")


def _plain(text: str, tools: Mapping[str, Sequence[str]]) -> list[ToolCall | ParseFault]:
    found: list[ToolCall | ParseFault] = []
    for line in text.splitlines():
        match = _CALL.fullmatch(line)
        if match is None or match[1] not in tools:
            continue
        name, rest = match[1], match[2].rstrip()
        if not rest.endswith(")"):
            found.append(ParseFault(line, "the parenthesis is not closed"))
            continue
        found.append(_positional(name, rest[:-1], line, tools[name]))
    return found


def _positional(name: str, inside: str, line: str, parameters: Sequence[str]) -> ToolCall | ParseFault:
    """Python literals, positional or by keyword; for a tool with one parameter anything else is a string."""
    try:
        tree = ast.parse(f"f({inside})", mode="eval").body
        assert isinstance(tree, ast.Call)
        values = [ast.literal_eval(item) for item in tree.args]
        named = {str(item.arg): ast.literal_eval(item.value) for item in tree.keywords}
    except (ValueError, SyntaxError, AssertionError, MemoryError, RecursionError):
        if len(parameters) == 1:
            return ToolCall(name, {parameters[0]: inside.strip()})
        return ParseFault(line, "expected literals as arguments")
    if len(values) > len(parameters):
        return ParseFault(line, f"{name} takes {len(parameters)} arguments, not {len(values)}")
    return ToolCall(name, {**dict(zip(parameters, values, strict=False)), **named})


def _known(
    name: str, arguments: Mapping[str, Any], body: str, tools: Mapping[str, Sequence[str]]
) -> ToolCall | ParseFault:
    if name not in tools:
        return ParseFault(body, f"there is no tool {name!r}; the tools are {', '.join(tools)}")
    return ToolCall(name, arguments)
