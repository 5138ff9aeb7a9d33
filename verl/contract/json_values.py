"""Values of columns and of meta_info as JSON that gives back what it was made of.

What JSON has a form for is written in it: null, booleans, numbers, texts, lists, dicts with text keys. Everything else
is an object with the one key `__verl__`, whose value begins with a name:

    {"__verl__": ["tuple", [1, 2]]}    ["bytes", base64]    ["complex", [1.0, 0.0]]    ["integer", hexadecimal]
    ["array" | "scalar", dtype, shape, base64]    ["objects", shape, [...]]    ["tensor", dtype, shape, base64]
    ["numpy text", text]    ["numpy bytes", base64]    ["dict", [[key, value], ...]], of a dict with the key `__verl__`
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from verl.contract.source import Source
from verl.contract.tensor_bytes import from_bytes, raw_bytes
from verl.errors import DataProtoValidationError

KEY = "__verl__"
_PLAIN = frozenset({str, bool, int, float, type(None)})
_TOO_LONG = 2**4096  # whole numbers from here on are not written in decimal digits, which Python limits


def column_to_json(what: str, column: np.ndarray, source: Source | None = None) -> list[Any]:
    """The values of a column in JSON types, one for each row.

    Raises:
        DataProtoValidationError: naming the first row, and the place in it, that has no form here.
    """
    values = column.tolist()
    if _are_plain(values):
        return values
    encoded = []
    for row, value in enumerate(values):
        try:
            encoded.append(to_json(f"{what}[{row}]", value))
        except DataProtoValidationError as error:
            if source is None:
                raise
            raise DataProtoValidationError(f"{error}\n  Source: {source}") from None
    return encoded


def to_json(what: str, value: Any) -> Any:
    """The value in JSON types.

    Raises:
        DataProtoValidationError: naming the place within `value` that has no form here.
    """
    try:
        return _encoded(what, value)
    except RecursionError:
        raise DataProtoValidationError(f"{what} contains itself, or is nested too deeply to be saved.") from None


def dumps(value: Any) -> str:
    """JSON types as a text."""
    return json.dumps(value)


def loads(text: str | bytes) -> Any:
    """What was encoded into this text."""
    return json.loads(text, object_hook=_decoded if _mentions_key(text) else None)


def _mentions_key(text: str | bytes) -> bool:
    return (KEY.encode() in text) if isinstance(text, bytes) else (KEY in text)


def _encoded(what: str, value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not int or -_TOO_LONG < value < _TOO_LONG else {KEY: ["integer", hex(value)]}
    if isinstance(value, np.generic):
        return _encoded_scalar(what, value)
    if isinstance(value, (str, int, float)):  # members of enumerations and the like, as what they stand for
        return _base_of(value)
    if isinstance(value, list):
        return _encoded_items(what, value)
    if isinstance(value, tuple):
        return {KEY: ["tuple", _encoded_items(what, value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = {_base_of(key): _encoded(f"{what}[{key!r}]", item) for key, item in value.items()}
        return {KEY: ["dict", list(items.items())]} if KEY in items else items
    if isinstance(value, (bytes, bytearray)):
        return {KEY: ["bytes" if isinstance(value, bytes) else "bytearray", _base64(value)]}
    if isinstance(value, complex):
        return {KEY: ["complex", [value.real, value.imag]]}
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return _encoded_array(what, "array", value)
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        dtype = str(value.dtype).removeprefix("torch.")
        return {KEY: ["tensor", dtype, list(value.shape), _base64(raw_bytes(value).numpy())]}
    raise _no_form(what, value)


def _encoded_items(what: str, values: list[Any] | tuple[Any, ...]) -> list[Any]:
    if _are_plain(values):
        return list(values)
    return [_encoded(f"{what}[{place}]", item) for place, item in enumerate(values)]


def _are_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether JSON has a form of its own for all of them."""
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        return False
    numbers = values if kinds == {int} else [x for x in values if type(x) is int] if int in kinds else ()
    return not numbers or (min(numbers) > -_TOO_LONG and max(numbers) < _TOO_LONG)


def _base_of(value: str | float) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _encoded_scalar(what: str, value: np.generic) -> Any:
    if isinstance(value, np.str_):
        return {KEY: ["numpy text", str(value)]}
    if isinstance(value, np.bytes_):
        return {KEY: ["numpy bytes", _base64(value)]}
    return _encoded_array(what, "scalar", np.asarray(value))


def _encoded_array(what: str, name: str, array: np.ndarray) -> Any:
    if array.dtype == object:
        return {KEY: ["objects", list(array.shape), _encoded_items(what, array.reshape(-1).tolist())]}
    description = np.lib.format.dtype_to_descr(array.dtype) if array.dtype.kind != "T" else None
    if description is None or array.dtype.hasobject or _dtype(description) != array.dtype:
        raise _no_form(what, array)
    return {KEY: [name, description, list(array.shape), _base64(array.tobytes())]}


def _dtype(description: Any) -> np.dtype:
    """A dtype of NumPy from its description, whose tuples JSON has as lists."""
    return np.lib.format.descr_to_dtype(_with_tuples(description))


def _with_tuples(description: Any) -> Any:
    if not isinstance(description, (list, tuple)):
        return description
    return [tuple(_inner(part) for part in field) for field in description]


def _inner(part: Any) -> Any:
    """A part of a field's description: its name, its dtype (a text, or fields again), or its shape."""
    if isinstance(part, (list, tuple)):
        is_fields = bool(part) and isinstance(part[0], (list, tuple)) and len(part[0]) > 1
        return _with_tuples(part) if is_fields else tuple(part)
    return part


def _base64(data: Any) -> str:
    return base64.b64encode(data).decode("ascii")


def _decoded(found: dict[str, Any]) -> Any:
    if len(found) != 1 or not isinstance(tagged := found.get(KEY), list) or not tagged:
        return found
    decode = _DECODE.get(tagged[0])
    return found if decode is None else decode(*tagged[1:])


def _array(description: Any, shape: list[int], data: str) -> np.ndarray:
    dtype = _dtype(description)
    if not data:
        return np.zeros(shape, dtype)
    return np.frombuffer(bytearray(base64.b64decode(data)), dtype).reshape(shape)


def _objects(shape: list[int], values: list[Any]) -> np.ndarray:
    array = np.empty(math.prod(shape), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array.reshape(shape)


_DECODE: dict[str, Callable[..., Any]] = {
    "tuple": tuple,
    "bytes": base64.b64decode,
    "bytearray": lambda data: bytearray(base64.b64decode(data)),
    "complex": lambda parts: complex(*parts),
    "integer": lambda digits: int(digits, 16),
    "dict": dict,
    "array": _array,
    "scalar": lambda *array: _array(*array)[()],
    "objects": _objects,
    "numpy text": np.str_,
    "numpy bytes": lambda data: np.bytes_(base64.b64decode(data)),
    "tensor": lambda dtype, shape, data: from_bytes(bytearray(base64.b64decode(data)), getattr(torch, dtype), shape),
}


def _no_form(what: str, value: Any) -> DataProtoValidationError:
    found = "a dict whose keys are not all texts" if isinstance(value, dict) else f"a {type(value).__name__}"
    if isinstance(value, np.ndarray):
        found = f"an array of {value.dtype}"
    return DataProtoValidationError(
        f"{what} is {found}, which JSON cannot hold: a batch is saved without pickle, so columns and meta_info may "
        "hold numbers, texts, bytes, booleans, null, arrays, tensors, lists, tuples, and dicts with text keys. Convert "
        "it, or leave it out with select(...)."
    )
