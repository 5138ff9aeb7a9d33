"""Texts with places for columns of the data: `Question: {prompt} ... {answer}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl.errors import RewardError

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
