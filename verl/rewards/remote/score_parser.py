"""Prompt templates with columns of the data, and scores parsed from a reply: by a pattern, or by a path in its JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.errors import RewardError
from verl.http_client.request import RetryableAnswer
from verl.rewards.base import LARGEST, shown

# Only {name} is replaced, so that templates may contain JSON; {{name}} is the literal text {name}.
_PLACE = re.compile(r"\{\{(?P<literal>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


def places(template: str) -> list[str]:
    """The names in a template, in order."""
    return list(dict.fromkeys(match["name"] for match in _PLACE.finditer(template) if match["name"]))


def filled(template: str, texts: Mapping[str, Any]) -> str:
    """Fill in a template; the values are not searched for further names.

    Raises:
        RewardError: a name of the template is not a column.
    """

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return f"{{{match['literal']}}}"
        return as_text(column(texts, name, "template names {" + name + "}"))

    return _PLACE.sub(put, template)


def column(texts: Mapping[str, Any], name: str, required_by: str) -> Any:
    """A column by its name.

    Args:
        texts: columns by name.
        name: of the column.
        required_by: what needs the column, as the start of the message.
    Raises:
        RewardError: there is no such column.
    """
    if name not in texts:
        raise RewardError(f"{required_by}, and the data has no such column. It has {', '.join(sorted(texts))}.")
    return texts[name]


def as_text(value: Any) -> str:
    """A value as text: lists and mappings as JSON, anything else by `str`."""
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class NotFinite(RetryableAnswer):
    """The score is a number, but not finite."""


def by_pattern(text: str, pattern: re.Pattern[str]) -> float:
    """The number in the last match of a pattern: its first group, or the whole match if it has no group.

    The last match, since a judge that reasons first writes its verdict at the end.

    Raises:
        RetryableAnswer: there is no match, or it is not a number.
    """
    matches = list(pattern.finditer(text))
    if not matches:
        raise RetryableAnswer(f"an answer that score_pattern does not match: {shown(text)}")
    return number(matches[-1][1 if pattern.groups else 0])


def by_path(text: str, path: str) -> float:
    """The number at a path such as `scores.0.value` in the JSON of a text, which may stand in prose or a code fence.

    Raises:
        RetryableAnswer: there is no JSON, no such path, or no number there.
    """
    for value in _json_values(text):
        try:
            return number(at(value, path))
        except LookupError:
            continue
    raise RetryableAnswer(f"an answer without JSON that has {path}: {shown(text)}")


def at(value: Any, path: str | None) -> Any:
    """The value at a dotted path of keys and indices; `value` itself for None.

    Raises:
        LookupError: there is no such path.
    """
    for step in path.split(".") if path else ():
        if isinstance(value, list) and step.lstrip("-").isdigit():
            value = value[int(step)]
        elif isinstance(value, dict):
            value = value[step]
        else:
            raise LookupError(step)
    return value


def number(value: Any) -> float:
    """Convert a number, a bool or a text with a number to a float.

    Raises:
        RetryableAnswer: the value is not a number; NotFinite if it is not finite.
    """
    try:
        is_one = isinstance(value, (bool, int, float)) or (isinstance(value, str) and "_" not in value)  # 1_0 is 10
        number = float(value) if is_one else None
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise RetryableAnswer(f"{shown(value)} in place of a number")
    if math.isnan(number) or abs(number) > LARGEST:
        raise NotFinite(f"the score {number!r}")
    return number


def _json_values(text: str) -> Iterator[Any]:
    """JSON values in a text: the whole text, or the objects and lists in it, last one first."""
    decoder, values, offset = json.JSONDecoder(), [], 0
    while (opening := re.compile(r"[{\[]").search(text, offset)) is not None:
        try:
            value, offset = decoder.raw_decode(text, opening.start())
            values.append(value)
        except (ValueError, RecursionError):
            offset = opening.start() + 1
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        yield from reversed(values)
