"""Detection of the format in which a chat template writes tool calls: calls are rendered and parsed back.

Models are trained on text that their chat template renders, so a format that parses it also parses the model's calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from verl.data.chat_template import ChatTemplate, shortened
from verl.environments.tool_calls.parse import MARKED, ParseFault, ToolCall, ToolFormat, find_calls, parse_calls
from verl.errors import ConfigError

QUESTION = "verlstandinaskedx"
SOURCE = "a stand-in conversation"
_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "a text"},
        "count": {"type": "integer", "description": "a whole number"},
        "ratio": {"type": "number", "description": "a number"},
        "flag": {"type": "boolean", "description": "a truth value"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "a text or nothing"},
        "options": {"type": "object", "description": "an object"},
        "items": {"type": "array", "items": {"type": "object"}, "description": "a list"},
    },
    "required": [],
}
TOOLS = {"standin_find": _PARAMETERS, "standin_store": _PARAMETERS}


@dataclass(frozen=True)
class _Case:
    """A turn of the model: its calls, and the text before them."""

    name: str
    calls: Sequence[ToolCall]
    text: str = ""


def _find(**arguments: Any) -> ToolCall:
    return ToolCall("standin_find", arguments)


ONE, TWO = "one call", "two calls"
CASES = (
    _Case(ONE, [_find(text="abc", count=3)]),
    _Case(TWO, [_find(text="abc"), ToolCall("standin_store", {"count": 3})]),
    _Case("no arguments", [_find()]),
    _Case("text before the call", [_find(text="abc")], text="First this is looked up."),
    _Case("quotation marks and backslashes", [_find(text="She said \"no\", it's 'C:\\new\\table' or \\d+")]),
    _Case("white space around", [_find(text="  indented \n")]),
    _Case("several lines", [_find(text="first\n  second\n\nlast")]),
    _Case("other scripts", [_find(text="Zürich 東京 🙂")]),
    _Case("numbers, truth values and null", [_find(count=-3, ratio=2.5, flag=False, maybe=None)]),
    _Case("texts that look like numbers", [_find(text="75001", maybe="007", flag=True)]),
    _Case(
        "nested objects",
        [_find(options={"a": [1, True, None, {"b": "c, d=1) {"}]}, items=[{"e": 'it\'s "f"'}, {"g": -0.5}])],
    ),
)


def format_of(chat: ChatTemplate, chosen: ToolFormat = "auto") -> ToolFormat:
    """The format of tool calls.

    `auto` is the first format that parses every call that the template renders; `plain` without a template, or with one
    that does not support tools. A chosen format is checked in the same way, except `plain`, which no template writes,
    and except for templates that render no calls.

    Raises:
        ConfigError: the format does not parse what the template renders, or the template shows tools and no calls.
    """
    if chosen == "plain" or chat.source is None:
        return "plain" if chosen == "auto" else chosen
    rendered = {case.name: _rendered(chat, case) for case in CASES}
    if not any(isinstance(text, str) and "standin_find" in text for text in rendered.values()):
        return _without_calls(chat, chosen)
    candidates: list[ToolFormat] = [*MARKED, "llama"] if chosen == "auto" else [chosen]
    nearest: tuple[int, str] = (-1, "")
    for style in candidates:
        if (difference := _difference(rendered, style)) is None:
            return style
        nearest = max(nearest, (difference[0], f"{difference[1]} (read as {style})"))
    other = "" if chosen == "auto" else "environment.tool_format=auto, "
    raise ConfigError(
        f"tool_format is {chosen}, and calls that the chat template renders cannot be read back: {nearest[1]}. "
        f"Calls of the model would be lost. Set {other}another data.chat_template, or environment.tool_format=plain "
        "and describe in the prompts that a call is a line `name(arguments)`."
    )


def _without_calls(chat: ChatTemplate, chosen: ToolFormat) -> ToolFormat:
    if chosen != "auto":
        return chosen
    if chat.reads_tools or "tool_calls" in (chat.source or ""):
        raise ConfigError(
            "tool_format is auto, and the chat template knows tools but renders no calls of the assistant, so their "
            f"format is unknown. Set environment.tool_format to one of {', '.join(get_args(ToolFormat)[1:])}, or "
            "another data.chat_template."
        )
    return "plain"


def _rendered(chat: ChatTemplate, case: _Case) -> str | ConfigError:
    """The turn as the template renders it, or the error of the template."""
    schemas = [
        {"type": "function", "function": {"name": name, "description": "a stand-in", "parameters": parameters}}
        for name, parameters in TOOLS.items()
    ]
    tools = schemas if chat.reads_tools else None
    question = [{"role": "user", "content": QUESTION}]
    turn = {"role": "assistant", "content": case.text, "tool_calls": [as_message(call) for call in case.calls]}
    try:
        prompt = chat.render(question, SOURCE, reply_follows=True, tools=tools)
        text = chat.render([*question, turn], SOURCE, reply_follows=False, tools=tools)
    except ConfigError as error:
        return error
    return text.removeprefix(prompt) if text.startswith(prompt) else text[text.rfind(QUESTION) + len(QUESTION) :]


def stand_in_turn(chat: ChatTemplate, style: ToolFormat) -> str:
    """A turn of the model that ends with a call, as the template renders it."""
    text = "standin_find(1)" if style == "plain" else _rendered(chat, CASES[0])
    calls = find_calls(text, style, TOOLS) if isinstance(text, str) else []
    return text[: calls[-1].end] if calls and isinstance(text, str) else ""


def as_message(call: ToolCall, number: int = 0) -> dict[str, Any]:
    """A call in an assistant's message."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _difference(rendered: Mapping[str, str | ConfigError], style: ToolFormat) -> tuple[int, str] | None:
    """(number of cases that are parsed back, the first one that is not); None if all are.

    A template may refuse or omit a second call in a turn: the model then writes one.
    """
    faults: list[str] = []
    for case in CASES:
        text = rendered[case.name]
        if isinstance(text, ConfigError):
            if case.name != TWO:
                faults.append(f"{case.name}: {text}")
            continue
        calls = _comparable(parse_calls(text, style, TOOLS))
        if calls != _comparable(case.calls) and not (case.name == TWO and calls == _comparable(case.calls[:1])):
            faults.append(f"{case.name} rendered as {shortened(text)}")
    return (len(CASES) - len(faults), faults[0]) if faults else None


def _comparable(calls: Sequence[ToolCall | ParseFault]) -> list[str]:
    """Comparable form of calls; `False` and 0 differ."""
    return [
        json.dumps([call.name, call.arguments], sort_keys=True) if isinstance(call, ToolCall) else "" for call in calls
    ]
