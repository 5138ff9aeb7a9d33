"""Parsers of tool-call arguments: their text becomes JSON values.

Formats write a value as JSON, as text between tags whose type is given by the tool's schema (`typed_value`), as Python
literals (`python_calls`), or as JSON with other quotation marks (`gemma_object`). All functions raise ValueError for
invalid text.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_ENDS = 32  # possible ends of an argument or a call that are tried
MAX_BITS = 14_000  # of an integer: Python converts at most 4300 decimal digits
MAX_DEPTH = 64  # of nested lists and mappings; deeper ones would exceed a recursion limit later


def json_value(value: Any, depth: int = 0) -> Any:
    """A copy that consists of JSON values only; tuples become lists.

    Raises:
        ValueError: it has other values, is nested too deep, or has a number or text that JSON in UTF-8 cannot hold.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("the keys of an object must be texts")
        return {json_value(key): json_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, depth + 1) for item in value]
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text is not valid Unicode (a lone surrogate)") from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number in JSON")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("a number has too many digits")
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise ValueError(f"a {type(value).__name__} is not a JSON value")
    return value


def from_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not valid, or nested too deep.
    """
    try:
        return json_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(json_fault(error)) from error


def json_fault(error: Exception) -> str:
    """Description of why a text is not a JSON value."""
    if isinstance(error, RecursionError):
        return f"nested deeper than {MAX_DEPTH}"
    return f"no JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)


_PYTHON = {"True": True, "False": False, "None": None, "none": None}
_KINDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


def typed_value(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The value of an argument that is written as plain text.

    Args:
        schema: of the argument. If it allows strings, text that cannot be parsed as another of its types is a string.
            An empty schema allows any type.
        root: the schema that contains it, for `$ref`.
    Raises:
        ValueError: the text has none of the types of the schema.
    """
    kinds = _kinds(schema, root, 0)
    if kinds == {"string"}:
        return json_value(text)
    word = text.strip()
    try:
        value = _PYTHON[word] if word in _PYTHON else from_json(word)
    except ValueError:
        value = text
    if not kinds or kinds & set(_kind_names(value)):
        return json_value(value)
    if "string" in kinds:
        return json_value(text)
    raise ValueError(f"{text[:100]!r} is not of type {' or '.join(sorted(kinds))}")


def _kind_names(value: Any) -> tuple[str, ...]:
    names = next(names for kind, names in _KINDS if isinstance(value, kind))
    return (*names, "integer") if isinstance(value, float) and value.is_integer() else names


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Types that a schema names; empty if it allows any."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        return _kinds((root.get("$defs") or {}).get(reference.removeprefix("#/$defs/")), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, (str, list)):
        kinds = {declared} if isinstance(declared, str) else {kind for kind in declared if isinstance(kind, str)}
        return kinds | {"null"} if schema.get("nullable") else kinds
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(union), list):
            choices = [_kinds(choice, root, depth + 1) for choice in schema[union]]
            return set().union(*choices) if all(choices) else set()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {name for value in values for name in _kind_names(value)}


GEMMA_QUOTE = '<|"|>'
_GEMMA = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<bare>[^{}\[\],:"<]+)(?P<colon>:?)', re.DOTALL
)


def gemma_object(text: str) -> Any:
    """The value of a JSON object with unquoted keys, and strings between `<|"|>`."""

    def as_json(found: re.Match[str]) -> str:
        if found["text"] is not None:
            return json.dumps(found["text"])
        if found["quoted"] is not None:
            return found["quoted"]
        word = found["bare"].strip()
        if found["colon"]:
            return f"{json.dumps(word)}:"
        return "null" if word == "None" else found["bare"]

    return from_json(_GEMMA.sub(as_json, text))


_NAME = r"[^\W\d][\w.\-/]*"
_CALL = re.compile(rf"\s*({_NAME})\(\s*")
_KEYWORD = re.compile(rf"({_NAME})\s*=\s*")
_VALUE_END = re.compile(rf",\s*(?={_NAME}\s*=)|\)\s*(?=,\s*{_NAME}\(|\]?\s*\Z)")


def python_calls(text: str, is_escaped: bool) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a list `[f(a='text', b=[1, 2]), g()]`.

    A value ends at the first place where another argument, or the end of the call, may follow and the value parses.

    Args:
        is_escaped: strings have the escape sequences of Python; otherwise the text between the quotation marks is taken
            literally.
    """
    body = text.strip()
    if not (body.startswith("[") and body.endswith("]")):
        raise ValueError("expected a list of calls, [name(argument=value)]")
    if not body[1:-1].strip():
        raise ValueError("expected a call, name(argument=value), in the list")
    calls: list[tuple[str, dict[str, Any]]] = []
    position = 1
    while position < len(body) - 1:
        begin = _CALL.match(body, position)
        if begin is None:
            raise ValueError(f"expected name(argument=value) at {body[position : position + 40]!r}")
        arguments, position = _python_arguments(body, begin.end(), is_escaped)
        calls.append((begin[1], arguments))
        position += len(body[position:]) - len(body[position:].lstrip(", \n\t"))
    return calls


def _python_arguments(body: str, position: int, is_escaped: bool) -> tuple[dict[str, Any], int]:
    """The arguments of a call from the position after its parenthesis, and the position after the call."""
    arguments: dict[str, Any] = {}
    if body.startswith(")", position):
        return arguments, position + 1
    while keyword := _KEYWORD.match(body, position):
        reason = "it is not closed"
        for end in itertools.islice(_VALUE_END.finditer(body, keyword.end()), MAX_ENDS):
            try:
                arguments[keyword[1]] = _python_value(body[keyword.end() : end.start()], is_escaped)
            except ValueError as error:
                reason = str(error)
                continue
            if ")" in end[0]:
                return arguments, end.end()
            position = end.end()
            break
        else:
            raise ValueError(f"the argument {keyword[1]} cannot be read: {reason}")
    raise ValueError(f"expected argument=value at {body[position : position + 40]!r}")


def _python_value(text: str, is_escaped: bool) -> Any:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" and not is_escaped:
        return json_value(text[1:-1])
    try:
        return from_json(text)
    except ValueError:
        return literal(text)


def literal(text: str | ast.expr) -> Any:
    """The value of a Python literal, given as text or syntax tree, that consists of JSON values.

    Raises:
        ValueError: it is not a literal of JSON values, or nested too deep.
    """
    try:
        return json_value(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        # TypeError: {[]: 1}; MemoryError: the parser's stack is full
        what = repr(text[:100]) if isinstance(text, str) else "the argument"
        raise ValueError(f"{what} is not a literal ({error})") from error
