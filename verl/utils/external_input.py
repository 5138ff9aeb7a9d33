"""Validation of untrusted names, paths and JSON that are read from disk or storage.

A name becomes part of a path only by `checked_name` or `checked_path`, and a record becomes an object only by
`parse_json` or `parse_as`. Any fault is an `ExternalInputError`. `read_record` and `verl.tracking.jsonl` read run
directories.
"""

from __future__ import annotations

import json
import math
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")
LONGEST_PATH = 4096
LONGEST_NAME = 255  # bytes of a part of a path, in the usual file systems
LARGEST_FILE = 2**53  # bytes, more than any file system supports
LARGEST_RECORD = 2**24  # bytes of a file that is read whole, and of a line
LARGEST_YAML = 2**20  # bytes
MAX_NESTING = 100  # lists and mappings within each other, of JSON and YAML


ByteCount = Annotated[int, Field(ge=0, le=LARGEST_FILE)]
"""The type of a number of bytes, rows or steps in a record."""


class ExternalInputError(ValueError):
    """Input that was read is invalid; the message says why."""


def checked_name(name: object, taken: frozenset[str] | set[str] = frozenset()) -> str:
    """Check and return the name of a file or directory: a single path component.

    >>> checked_name("global_step_100")
    'global_step_100'

    Args:
        name: the input.
        taken: reserved names.
    Raises:
        ExternalInputError: it is not a valid name.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ExternalInputError(f"{_shown(name)} is not a file name: expected letters, digits and . _ = + -")
    if name in taken:
        raise ExternalInputError(f"{name!r} is a reserved name")
    return name


def checked_path(path: object) -> str:
    """Check and return a relative path below some directory.

    >>> checked_path("actor/model.safetensors")
    'actor/model.safetensors'

    Raises:
        ExternalInputError: it is absolute, leads out of the directory, or is not normalised.
    """
    if not isinstance(path, str) or not path or "\\" in path or "\0" in path or path.startswith("/"):
        raise ExternalInputError(f"{_shown(path)} is not a relative path with forward slashes")
    # Without pathlib, which would take half of the time of reading a manifest, with a path per slice.
    if not {"", ".", ".."}.isdisjoint(path.split("/")) or len(path) > LONGEST_PATH:
        raise ExternalInputError(f"{_shown(path)} is not normalised")
    return path


def parse_json(data: bytes | bytearray | memoryview | str) -> Any:
    """Parse JSON.

    Raises:
        ExternalInputError: the text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(data if isinstance(data, str) else bytes(data))
        if len(data) > MAX_NESTING and _depth([value]) > MAX_NESTING:
            raise ValueError(f"nested more than {MAX_NESTING} deep")
        return value
    except (ValueError, RecursionError) as error:
        raise ExternalInputError(f"it is not JSON ({type(error).__name__}: {error})") from error


def _depth(value: list | dict) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(x) for x in inside if isinstance(x, (dict, list))), default=0)


def parse_yaml(data: bytes) -> Any:
    """Parse YAML as the JSON values that it stands for; aliases are refused, since they multiply."""
    import yaml

    text, loader, depth = data.decode("utf-8", "replace"), getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_NESTING:
                raise ValueError(f"it has aliases, or is nested more than {MAX_NESTING} deep")
        return json.loads(json.dumps(yaml.load(text, loader), default=str))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ExternalInputError(f"it is not YAML ({type(error).__name__}: {error})") from error


def parse_mapping(data: bytes | bytearray | memoryview | str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ExternalInputError: the text is not a JSON object.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ExternalInputError(f"it is {_shown(value)} and not a mapping")
    return value


def checked_as(kind: type[T], value: Any) -> T:
    """Convert a parsed JSON value to a dataclass. Types are checked strictly; unknown fields are ignored.

    Raises:
        ExternalInputError: fields are missing or have other types; names each.
    """
    try:
        # From text, since pydantic in strict mode does not make a dataclass from a mapping.
        return parse_as(kind, json.dumps(value))
    except RecursionError as error:
        raise ExternalInputError("it is nested too deeply") from error


def parse_as(kind: type[T], data: bytes | bytearray | memoryview | str) -> T:
    """Parse JSON as a dataclass; see `checked_as`.

    Raises:
        ExternalInputError: the text is not JSON, or does not have these types.
    """
    try:
        return _adapter(kind).validate_json(bytes(data) if isinstance(data, memoryview) else data, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        faults_text = [f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}" for fault in faults[:5]]
        raise ExternalInputError("; ".join(faults_text)) from error


def plain(value: Any) -> Any:
    """Convert to a JSON value to write; numbers that are not finite and unknown objects become texts."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return plain(value.tolist())
    return str(value)


def printable(text: str, keep: str = "\t") -> str:
    """Escape characters that a terminal would interpret: a name that was read may hold them.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'

    Args:
        keep: control characters that stay.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def ends_with_partial_line(file: BinaryIO) -> bool:
    """Whether a file, which is open for reading, ends with a partial line, left by a process that was killed."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, by renaming `NAME.unfinished` in the same directory.

    Raises:
        OSError: the message includes the path, whose former content stays.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_record(file: Path) -> Any:
    """The value in a JSON or YAML file of a run directory, which may be another person's; None if there is no file.

    Raises:
        ExternalInputError: it cannot be read; the message includes the path.
    """
    parse, most = (parse_yaml, LARGEST_YAML) if file.suffix == ".yaml" else (parse_json, LARGEST_RECORD)
    try:
        with open(file, "rb") as stream:
            data = stream.read(most + 1)
        if len(data) > most:
            raise ExternalInputError(f"it has more than {most} bytes")
        return parse(data)
    except FileNotFoundError:
        return None
    except (OSError, ExternalInputError) as error:
        raise ExternalInputError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def whole_number(value: object) -> int:
    """Check and return an integer in [0, LARGEST_FILE].

    Raises:
        ExternalInputError: it is not one.
    """
    if type(value) is not int or not 0 <= value <= LARGEST_FILE:
        raise ExternalInputError(f"{_shown(value)} is not a size")
    return value


@lru_cache(maxsize=32)
def _adapter(kind: type) -> Any:
    return TypeAdapter(kind)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
