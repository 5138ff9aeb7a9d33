"""External input: names, paths and JSON that come from a disk or a store, taken into checked types at one place.

Anybody may have written them. A name becomes part of a path only by `checked_name` or
`checked_path`, and a record becomes an object only by `parse_json` or `parse_as`; what is wrong with it is an
`ExternalInputError`, whatever it is.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")
LONGEST_PATH = 4096
LARGEST_FILE = 2**53  # bytes, more than any file system takes


ByteCount = Annotated[int, Field(ge=0, le=LARGEST_FILE)]
"""The type of a number of bytes, rows or steps in a record."""


class ExternalInputError(ValueError):
    """What was read is not what belongs there; the message says in what."""


def checked_name(name: object, taken: frozenset[str] | set[str] = frozenset()) -> str:
    """The name of a file or directory, as it was given: one part of a path, which leads nowhere else.

    >>> checked_name("global_step_100")
    'global_step_100'

    Args:
        taken: names that have a meaning of their own.
    Raises:
        ExternalInputError: it is no such name.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ExternalInputError(f"{_shown(name)} names no file: expected letters, digits and . _ = + -")
    if name in taken:
        raise ExternalInputError(f"{name!r} is a name of the store's own")
    return name


def checked_path(path: object) -> str:
    """A path below some directory, as it was given.

    >>> checked_path("actor/model.safetensors")
    'actor/model.safetensors'

    Raises:
        ExternalInputError: it is absolute, leads out of the directory, or is not in its simplest form.
    """
    if not isinstance(path, str) or not path or "\\" in path or "\0" in path or path.startswith("/"):
        raise ExternalInputError(f"{_shown(path)} is no relative path with forward slashes")
    # By hand: a manifest has a path for every slice, and pathlib would take half of the time of reading it.
    if not {"", ".", ".."}.isdisjoint(path.split("/")) or len(path) > LONGEST_PATH:
        raise ExternalInputError(f"{_shown(path)} is not in its simplest form")
    return path


def parse_json(data: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text.

    Raises:
        ExternalInputError: it is none, or one that is nested beyond measure.
    """
    try:
        return json.loads(data if isinstance(data, str) else bytes(data))
    except (ValueError, RecursionError) as error:
        raise ExternalInputError(f"it is no JSON ({type(error).__name__}: {error})") from error


def parse_mapping(data: bytes | bytearray | memoryview | str) -> dict[str, Any]:
    """The same of a JSON object.

    Raises:
        ExternalInputError: it is none.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ExternalInputError(f"it holds {_shown(value)} and not a mapping")
    return value


def checked_as(kind: type[T], value: Any) -> T:
    """A parsed JSON value as a dataclass, whose fields must have the types that are declared; others are passed over.

    Raises:
        ExternalInputError: a field is missing or of another type; names each.
    """
    try:
        # Of a text: from a mapping pydantic makes no dataclass where nothing may be converted.
        return parse_as(kind, json.dumps(value))
    except RecursionError as error:
        raise ExternalInputError("it is nested beyond measure") from error


def parse_as(kind: type[T], data: bytes | bytearray | memoryview | str) -> T:
    """A JSON text as a dataclass; see `checked_as`.

    Raises:
        ExternalInputError: it is no JSON, or not of these types.
    """
    try:
        return _adapter(kind).validate_json(bytes(data) if isinstance(data, memoryview) else data, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        said = [f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}" for fault in faults[:5]]
        raise ExternalInputError("; ".join(said)) from error


def whole_number(value: object, most: int = LARGEST_FILE) -> int:
    """A number from 0.

    Raises:
        ExternalInputError: it is none, or above what can be.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ExternalInputError(f"{_shown(value)} is no size")
    return value


@lru_cache(maxsize=32)
def _adapter(kind: type) -> Any:
    return TypeAdapter(kind)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
