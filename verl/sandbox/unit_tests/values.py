"""Values that the process of a test and the process of a program exchange, as JSON.

None, numbers, texts, bytes, lists, tuples, sets and dicts of these. Decoding makes exactly these built-in types, so
that a program cannot send an object whose comparison it defines.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # an import of `typing` would take time in every sandbox
if TYPE_CHECKING:
    from typing import Any

CHANNEL_FD = 3
_SCALARS = (bool, int, float)
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}

if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


class NotPlain(Exception):
    """A value that cannot be exchanged, such as an object of a class, a function or a generator."""


def encode(value: Any) -> Any:
    """JSON form of a value; an object of a subclass becomes one of the built-in type.

    Raises:
        NotPlain: of the type at fault.
    """
    if value is None:
        return None
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise NotPlain(type(value).__name__)


def decode(data: Any) -> Any:
    """The value that `encode` was given.

    Raises:
        ValueError, TypeError: not made by `encode`.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](decode(item) for item in content)
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray).fromhex(content)
    if name == "complex":
        return complex(*content)
    raise ValueError(name)


def overwrite(argument, changed):
    """Give a mutable argument the content that the program's copy of it has after a call."""
    if isinstance(argument, (list, bytearray)):
        argument[:] = changed
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(changed)


class Messages:
    """Messages in both directions over the channel, a line of JSON each."""

    def __init__(self):
        self._reader = os.fdopen(CHANNEL_FD, "rb")

    def send(self, message):
        text = json.dumps(message).encode() + b"\n"
        while text:
            text = text[os.write(CHANNEL_FD, text) :]

    def receive(self):
        """Raises EOFError: the other process has ended."""
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)
