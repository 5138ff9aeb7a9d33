"""Parser of tool calls in a turn, for the formats of several model families.

hermes          <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                        Qwen 2.5, Qwen 3, Hermes
xml             <tool_call><function=add><parameter=a>1</parameter></function></tool_call>           Qwen 3.5, Nemotron 3
glm             <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>               GLM 4.5
atem            <atem:invoke name="add"><atem:parameter name="a">1</atem:parameter></atem:invoke>    Muse
minimax         <minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>   MiniMax M2
mistral         [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}] or [TOOL_CALLS]add[ARGS]{"a": 1}    Mistral, Ministral
deepseek        <｜tool▁call▁begin｜>function<｜tool▁sep｜>add ```json {"a": 1}```<｜tool▁call▁end｜>    DeepSeek V3, R1
harmony         <|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>                    gpt-oss
gemma           <|tool_call>call:add{a:1}<tool_call|>                                                Gemma 4
functiongemma   <start_function_call>call:add{a:1}<end_function_call>                                FunctionGemma
lfm             <|tool_call_start|>[add(a=1, b='it\\'s')]<|tool_call_end|>                            LFM 2, 2.5-VL
lfm_unescaped   the same, but what is between quotation marks has no escape sequences                LFM 2.5
llama           {"name": "add", "parameters": {"a": 1}}                                              Llama 3, after <|python_tag|> or alone
plain           add(1, 2)                                                                            a line of its own; the built-in model

Any text gives calls and faults, never an exception, also if it is nested too deep or is not valid Unicode.
"""

# ruff: noqa: E501, RUF001 - the table above; marks of DeepSeek have a full-width bar

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.environments.tool_calls.arguments import (
    GEMMA_QUOTE,
    MAX_ENDS,
    from_json,
    gemma_object,
    json_fault,
    json_value,
    literal,
    python_calls,
    typed_value,
)

ToolFormat = Literal[
    "auto",
    "hermes",
    "xml",
    "glm",
    "atem",
    "minimax",
    "mistral",
    "deepseek",
    "harmony",
    "gemma",
    "functiongemma",
    "lfm",
    "lfm_unescaped",
    "llama",
    "plain",
]
Tools = Mapping[str, Mapping[str, Any]]  # JSON schemas of their arguments, by name


@dataclass(frozen=True)
class ToolCall:
    """A parsed call.

    Attributes:
        arguments: JSON values by name; positional arguments of the format `plain` get the names of the tool's
            parameters.
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


@dataclass(frozen=True)
class FoundCall:
    """A call, or a failed attempt at one, between two positions of a text."""

    start: int
    end: int
    call: ToolCall | ParseFault


Calls = list[tuple[str, Any]]  # names and arguments


@dataclass(frozen=True)
class MarkedFormat:
    """A format whose calls stand between two marks.

    Attributes:
        opening, closing: the marks. The call ends at the first closing mark at which it can be parsed, since an
            argument may contain a closing mark.
        read: parses the calls between the marks; raises ValueError with the reason.
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    read: Callable[[str, Tools], Calls]


def parse_calls(text: str, style: ToolFormat, tools: Tools) -> list[ToolCall | ParseFault]:
    """The calls in a turn, in order; empty if the turn is an answer.

    A call in another format than `style` is a fault, unless that format has no marks (`plain`). Calls in the model's
    reasoning are ignored.

    Args:
        text: of a turn that ended with a stop token.
        tools: JSON schemas of their arguments, by name.
    """
    return [item.call for item in find_calls(text, style, tools)]


def find_calls(text: str, style: ToolFormat, tools: Tools) -> list[FoundCall]:
    """The calls in a turn with their positions; see `parse_calls`."""
    if not tools:
        return []
    if style in MARKED:
        found = _scan_marked(text, MARKED[style], tools)
    else:
        found = _scan_plain(text, tools) if style == "plain" else _scan_llama(text, tools)
    calls = _without_reasoning(text, list(found))
    if not calls and (other := _other_format(text, style, tools)) is not None:
        reason = f"this is a call in the format {other}; the format of calls is {style}"
        calls = [FoundCall(0, len(text), ParseFault(text, reason))]
    reasoning = _REASONING_END.search(text)
    if not calls and (end := _CALL_END.search(text, reasoning.end() if reasoning else 0)) is not None:
        calls = [FoundCall(0, len(text), ParseFault(text, f"{end[0]} ends a call that has no beginning"))]
    return [_of_known_tool(item, tools, text) for item in calls]


_CALL_END = re.compile(
    r"</tool_call>|<tool_call\|>|<\|tool_call_end\|>|<｜tool▁calls?▁end｜>|</atem:invoke>|<\|call\|>"
    r"|</minimax:tool_call>|<end_function_call>"
)
_REASONING_END = re.compile(r"</think>|<channel\|>")


def _without_reasoning(text: str, found: list[FoundCall]) -> list[FoundCall]:
    """Calls after the model's reasoning, which ends at the first end mark that is not within a call."""
    calls = [item for item in found if isinstance(item.call, ToolCall)]
    for end in _REASONING_END.finditer(text):
        if not any(call.start <= end.start() < call.end for call in calls):
            return [item for item in found if item.start >= end.start()]
    return found


_BARE_CALL = re.compile(r'(?:.*<\|python_tag\|>)|\s*\{\s*"name"\s*:\s*"([^"]*)"', re.DOTALL)


def _other_format(text: str, style: ToolFormat, tools: Tools) -> ToolFormat | None:
    """A format with marks, other than `style`, in which the text has a call; preferably one that can parse it."""
    unreadable: ToolFormat | None = None
    for name, form in MARKED.items():
        calls = [] if name == style else _without_reasoning(text, list(_scan_marked(text, form, tools)))
        if any(isinstance(item.call, ToolCall) for item in calls):
            return name
        if calls and unreadable is None:
            unreadable = name
    if unreadable is not None:
        return unreadable
    bare = _BARE_CALL.match(text)
    return "llama" if bare is not None and (bare[1] is None or bare[1] in tools) else None


def _of_known_tool(item: FoundCall, tools: Tools, text: str) -> FoundCall:
    call = item.call
    if isinstance(call, ParseFault) or call.name in tools:
        return item
    reason = f"there is no tool {call.name!r}; the tools are {', '.join(tools)}"
    return FoundCall(item.start, item.end, ParseFault(text[item.start : item.end], reason))


# Formats with marks


def _scan_marked(text: str, style: MarkedFormat, tools: Tools) -> Iterator[FoundCall]:
    position = 0
    while opening := style.opening.search(text, position):
        start, position = opening.start(), opening.end()
        reason, fault_end = f"{opening[0].strip()!r} is not followed by its end", None
        for closing in itertools.islice(style.closing.finditer(text, position), MAX_ENDS):
            try:
                calls = style.read(text[position : closing.start()], tools)
            except ValueError as error:
                if fault_end is None:
                    reason, fault_end = str(error), closing.end()
                continue
            yield from (FoundCall(start, closing.end(), ToolCall(name, arguments)) for name, arguments in calls)
            position = closing.end()
            break
        else:
            following = style.opening.search(text, position)
            end = min(following.start() if following else len(text), fault_end or len(text))
            position = max(position, end)
            yield FoundCall(start, position, ParseFault(text[start:position], reason))


def _json_call(call: Any, key: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("expected an object with a text `name`")
    arguments = call.get(key, call.get("arguments", call.get("parameters", {})))
    return call["name"], _json_object(arguments, key)


def _json_object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError as error:
            raise ValueError(f"{what} are not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object as {what}")
    return value


def _tagged(name: str, tag: str, remaining: str, form: str) -> Callable[[str, Tools], Calls]:
    """A parser of calls whose arguments are texts between tags.

    Args:
        name: regular expression from the opening mark to the first argument.
        tag, remaining: regular expressions of an argument, with groups `key` and `value`. It ends before another `tag`.
        form: the expected form, for messages.
    """
    start, argument = re.compile(rf"\s*{name}\s*"), re.compile(rf"{tag}{remaining}\s*(?={tag}|\Z)", re.DOTALL)

    def read(body: str, tools: Tools) -> Calls:
        begin, arguments = start.match(body), {}
        if begin is None:
            raise ValueError(f"expected {form}")
        schema, position = tools.get(begin["name"]) or {}, begin.end()
        properties = properties_of(schema)
        while match := argument.match(body, position):
            key = match["key"].strip()
            try:
                arguments[key] = typed_value(match["value"], properties.get(key, {}), schema)
            except ValueError as error:
                raise ValueError(f"argument {key!r}: {error}") from error
            position = match.end()
        if position < len(body):
            raise ValueError(f"expected {form}, found {body[position : position + 40]!r}")
        return [(begin["name"], arguments)]

    return read


def _invoked(prefix: str) -> Callable[[str, Tools], Calls]:
    """A parser of calls whose name and keys are attributes of the tags `invoke` and `parameter`."""
    return _tagged(
        r'name="(?P<name>[^"\n]+)">',
        f"<{prefix}parameter ",
        rf'name="(?P<key>[^"\n]+)">(?P<value>.*?)</{prefix}parameter>',
        f'<{prefix}invoke name="NAME"> and <{prefix}parameter name="KEY">VALUE</{prefix}parameter>',
    )


def _deepseek_call(body: str, tools: Tools) -> Calls:
    kind, separator, remaining = body.partition("<｜tool▁sep｜>")
    fenced = re.fullmatch(r"([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*", remaining, re.DOTALL)
    if not separator or (fenced is None and "```" in remaining[:200]):
        raise ValueError("expected function<｜tool▁sep｜>NAME and the arguments as JSON between ``` marks")
    name, arguments = (fenced[1], fenced[2]) if fenced is not None else (kind, remaining)
    return [(name.strip(), _json_object(from_json(arguments), "arguments"))]


_HARMONY = re.compile(
    r"(?:functions\.)?(?P<name>[^\s<]+)\s*(?:<\|channel\|>\s*\w+\s*)?(?:<\|constrain\|>)?\s*\w*\s*"
    r"<\|message\|>(?P<body>.*)",
    re.DOTALL,
)


def _harmony_call(body: str, tools: Tools) -> Calls:
    match = _HARMONY.fullmatch(body)
    if match is None:
        raise ValueError("expected to=functions.NAME<|channel|>commentary json<|message|> and the arguments as JSON")
    return [(match["name"], _json_object(from_json(match["body"]), "arguments"))]


def _mistral_calls(body: str, tools: Tools) -> Calls:
    name, mark, arguments = body.partition("[ARGS]")
    if mark:
        return [(name.partition("[CALL_ID]")[0].strip(), _json_object(from_json(arguments), "arguments"))]
    calls = from_json(body)
    if not isinstance(calls, list):
        raise ValueError("expected a list of calls, or NAME[ARGS] and the arguments as JSON")
    return [_json_call(call, "arguments") for call in calls]


_GEMMA = re.compile(r"\s*call:(?P<name>[^\s{]+)\s*(?P<body>\{.*\})\s*", re.DOTALL)


def _gemma_call(body: str, tools: Tools) -> Calls:
    match = _GEMMA.fullmatch(body)
    if match is None:
        raise ValueError("expected call:NAME{argument:value}")
    return [(match["name"], _json_object(gemma_object(match["body"]), "arguments"))]


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of the arguments of a tool, by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _marked(opening: str, closing: str, read: Callable[[str, Tools], Calls]) -> MarkedFormat:
    return MarkedFormat(re.compile(opening), re.compile(closing), read)


MARKED: Mapping[ToolFormat, MarkedFormat] = {
    "hermes": _marked(
        "<tool_call>", "</tool_call>", lambda body, tools: [_json_call(from_json(body.strip()), "arguments")]
    ),
    "xml": _marked(
        r"<tool_call>\s*<function=|<function=|<tool_call>",
        r"</function>(?:\s*</tool_call>)?|</tool_call>",
        _tagged(
            r"(?P<name>[^<>\n]+)>",
            "<parameter=",
            r"(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            "<function=NAME> and <parameter=KEY>VALUE</parameter>",
        ),
    ),
    "glm": _marked(
        "<tool_call>",
        "</tool_call>",
        _tagged(
            r"(?P<name>[^<\s{]+)",
            "<arg_key>",
            r"(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            "a name, <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>",
        ),
    ),
    "atem": _marked(
        r"<atem:invoke|<atem:function_calls>(?!\s*<atem:invoke)",
        r"</atem:invoke>(?:\s*</atem:function_calls>)?|</atem:function_calls>",
        _invoked("atem:"),
    ),
    "minimax": _marked(
        r"<invoke(?= name=)|<minimax:tool_call>(?!\s*<invoke)",
        r"</invoke>(?:\s*</minimax:tool_call>)?|</minimax:tool_call>",
        _invoked(""),
    ),
    "mistral": _marked(r"\[TOOL_CALLS\]", r"(?<=[\]}])(?=\s*(?:\[TOOL_CALLS\]|<|\Z))", _mistral_calls),
    "deepseek": _marked(
        "<｜tool▁call▁begin｜>|<｜tool▁calls▁begin｜>(?!\\s*<｜tool▁call▁begin｜>)",
        r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|<｜tool▁calls▁end｜>",
        _deepseek_call,
    ),
    "harmony": _marked(
        r"(?:\A\s*|<\|start\|>assistant\s*)(?:<\|channel\|>\w+\s*)?to=(?!user\b|self\b|assistant\b|all\b)"
        r"(?=functions\.|[\w.\-/]+\s*<\|)",
        r"<\|call\|>|<\|end\|>|(?=<\|start\|>)|\Z",
        _harmony_call,
    ),
    "gemma": _marked(r"<\|tool_call>", r"<tool_call\|>", _gemma_call),
    "functiongemma": _marked(
        "<start_function_call>",
        "<end_function_call>",
        lambda body, tools: _gemma_call(body.replace("<escape>", GEMMA_QUOTE), tools),
    ),
    "lfm": _marked(
        r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", lambda body, tools: python_calls(body, is_escaped=True)
    ),
    "lfm_unescaped": _marked(
        r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", lambda body, tools: python_calls(body, is_escaped=False)
    ),
}


# Formats without marks

_LLAMA = re.compile(r"(?P<sure><\|python_tag\|>\s*|\A\s*(?=\{)|(?<=\})\s*;\s*(?=\{))|(?=\{\s*\"name\"\s*:)")


def _scan_llama(text: str, tools: Tools) -> Iterator[FoundCall]:
    """JSON objects after the mark, or at the start of the turn, and others that have a name and arguments."""
    position = 0
    while opening := _LLAMA.search(text, position):
        start, is_sure = opening.end(), opening["sure"] is not None
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
            call: ToolCall | ParseFault = ToolCall(*_json_call(json_value(value), "parameters"))
            is_sure |= "parameters" in value or "arguments" in value or value["name"] in tools
        except (ValueError, RecursionError) as error:
            position = end = len(text)
            is_sure |= re.search(r'"(?:parameters|arguments)"', text[start:]) is not None
            call = ParseFault(text[start:], json_fault(error))
        position = max(end, start + 1)
        if is_sure:
            yield FoundCall(opening.start(), end, call)


_LINE = re.compile(r"\s*([A-Za-z_]\w*)\((.*)")


def _scan_plain(text: str, tools: Tools) -> Iterator[FoundCall]:
    position = 0
    for whole in text.splitlines(keepends=True):
        start, position = position, position + len(whole)
        line = whole.splitlines()[0]
        match = _LINE.fullmatch(line)
        if match is None or match[1] not in tools:
            continue
        name, remaining = match[1], match[2].rstrip()
        call: ToolCall | ParseFault
        if not remaining.endswith(")"):
            call = ParseFault(line, "the parenthesis is not closed")
        else:
            try:
                call = ToolCall(name, _positional(name, remaining[:-1], list(properties_of(tools[name]))))
            except ValueError as error:
                call = ParseFault(line, str(error))
        yield FoundCall(start, position, call)


def _positional(name: str, inside: str, parameters: list[str]) -> dict[str, Any]:
    """Python literals, positional or by keyword; for a tool with one parameter anything else is a string."""
    try:
        tree = ast.parse(f"f({inside})", mode="eval").body
        assert isinstance(tree, ast.Call)
        values = [literal(item) for item in tree.args]
        assert all(item.arg is not None for item in tree.keywords)
        named = {str(item.arg): literal(item.value) for item in tree.keywords}
    except (ValueError, SyntaxError, AssertionError, MemoryError, RecursionError) as error:
        if len(parameters) == 1:
            return {parameters[0]: json_value(inside.strip())}
        raise ValueError("expected literals as arguments") from error
    if len(values) > len(parameters):
        raise ValueError(f"{name} takes {len(parameters)} arguments, not {len(values)}")
    arguments = dict(zip(parameters, values, strict=False))
    if twice := [key for key in named if key in arguments]:
        raise ValueError(f"{name} gets the argument {twice[0]} twice")
    return arguments | named
