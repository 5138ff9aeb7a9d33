"""Prompt templates with columns of the data, and scores parsed from a judge's text: by a pattern, or at a place in
JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.errors import RewardError
from verl.http_client.request import RetryableAnswer
from verl.rewards.validation import LARGEST

# Only {name} is a place, so that JSON may stand in a template as it is; {{name}} is the text {name}.
_PLACE = re.compile(r"\{\{(?P<literal>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


def places(template: str) -> list[str]:
    """The names in a template, in order."""
    return list(dict.fromkeys(match["name"] for match in _PLACE.finditer(template) if match["name"]))


def filled(template: str, texts: Mapping[str, Any]) -> str:
    """The template with what its places name; what is put in is not searched for places.

    Raises:
        RewardError: there is no such column.
    """

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return f"{{{match['literal']}}}"
        return as_text(column(texts, name, "template names {" + name + "}"))

    return _PLACE.sub(put, template)


def column(texts: Mapping[str, Any], name: str, wish: str) -> Any:
    """A column by its name.

    Args:
        wish: who wants it, as the start of the message.
    Raises:
        RewardError: there is no such column.
    """
    if name not in texts:
        raise RewardError(f"{wish}, and the data has no such column. It has {', '.join(sorted(texts))}.")
    return texts[name]


def as_text(value: Any) -> str:
    """Texts as they are, lists and mappings as JSON, anything else as Python writes it."""
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


SHOWN = 120


class NotFinite(RetryableAnswer):
    """There is a number, and it is not finite."""


def by_pattern(text: str, pattern: re.Pattern[str]) -> float:
    """The number in the last place where a pattern matches: its first group, or all of it if it has none.

    The last one, since a judge that reasons first ends with its verdict.

    Raises:
        RetryableAnswer: it matches nowhere, or what it matches is no number.
    """
    matches = list(pattern.finditer(text))
    if not matches:
        raise RetryableAnswer(f"an answer in which score_pattern matches nothing: {shown(text)}")
    return number(matches[-1][1 if pattern.groups else 0])


def by_path(text: str, path: str) -> float:
    """The number at a place such as `scores.0.value` in the JSON of a text, also where prose or a fence is around it.

    Raises:
        RetryableAnswer: there is no JSON, no such place, or no number there.
    """
    for value in _json_values(text):
        try:
            return number(at(value, path))
        except LookupError:
            continue
    raise RetryableAnswer(f"an answer without JSON that has {path}: {shown(text)}")


def at(value: Any, path: str | None) -> Any:
    """What lies at a dotted path of keys and indices; the value itself for None.

    Raises:
        LookupError: there is no such place.
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
    """A number, a truth value or a text with a number as a float.

    Raises:
        RetryableAnswer: it is none; NotFinite where it is one, but not finite.
    """
    try:
        is_one = isinstance(value, (bool, int, float)) or (isinstance(value, str) and "_" not in value)  # 1_0 is 10
        found = float(value) if is_one else None
    except (ValueError, OverflowError):
        found = None
    if found is None:
        raise RetryableAnswer(f"{shown(value)} in place of a number")
    if math.isnan(found) or abs(found) > LARGEST:
        raise NotFinite(f"the score {found!r}")
    return found


def shown(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:80]} ... {text[-30:]}"


def _json_values(text: str) -> Iterator[Any]:
    """The JSON values in a text: all of it, or the objects and lists in it, from the last one on."""
    decoder, values, place = json.JSONDecoder(), [], 0
    while (found := re.compile(r"[{\[]").search(text, place)) is not None:
        try:
            value, place = decoder.raw_decode(text, found.start())
            values.append(value)
        except (ValueError, RecursionError):
            place = found.start() + 1
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        yield from reversed(values)
