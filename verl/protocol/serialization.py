"""Serialization of batches: raw buffers for other processes, one safetensors file with JSON for the disk."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.errors import DataProtoValidationError
from verl.protocol.provenance import Source


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU without gradient; shares memory if the tensor is already contiguous there."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `in_order`, [numel * itemsize] uint8."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    whole = in_order(tensor)  # with one element strides are arbitrary
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def from_bytes(data: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Inverse of `raw_bytes`, sharing the memory of `data`."""
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(tuple(shape))


def taken(tensor: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """tensor[rows] for any dtype; with `out` written there, without gradient."""
    try:
        return torch.index_select(tensor, 0, rows, out=out)
    except NotImplementedError:  # e.g. uint16 with one dim: use a dtype of equal size that torch can index
        like = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        place = None if out is None else out.view(like)
        return torch.index_select(tensor.view(like), 0, rows, out=place).view(tensor.dtype)


class OwnBytes:
    """Placeholder that pickles a tensor by its own bytes, and unpickles as that tensor.

    torch would pickle the whole storage of a view, and cannot load some dtypes.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __reduce__(self):
        tensor = self.tensor
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return _arrived, (
            raw_bytes(tensor).numpy(), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, is_parameter
        )  # fmt: skip

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copied(self.tensor)


def _arrived(
    raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = from_bytes(raw if raw.flags.writeable else raw.copy(), dtype, shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as a leaf tensor, which requires gradients if the original does."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(own, tensor.requires_grad)
    return own.requires_grad_(tensor.requires_grad)


def portable(value: Any) -> Any:
    """Replace dense tensors in lists, tuples, dicts and object arrays by `OwnBytes`; a value without tensors is
    returned unchanged.
    """
    return _portable(value, {})


_WITHOUT_TENSORS = frozenset({str, bytes, int, float, bool, type(None)})


def _portable(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if type(value) in _WITHOUT_TENSORS:
        return value
    if id(value) in known:
        return known[id(value)][1]
    if not _may_hold_tensors(value):
        return value
    known[id(value)] = (value, value)  # a value that contains itself is unchanged
    made = _made_portable(value, known)
    known[id(value)] = (value, made)
    return made


def _may_hold_tensors(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict):
        return not set(map(type, value.values() if kind is dict else value)) <= _WITHOUT_TENSORS
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
    return kind is np.ndarray and value.dtype == object


def _made_portable(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return OwnBytes(value)
    items = list(value.values()) if kind is dict else value.reshape(-1).tolist() if kind is np.ndarray else value
    if set(map(type, items)) <= _WITHOUT_TENSORS:
        return value
    made = [_portable(item, known) for item in items]
    if all(new is old for new, old in zip(made, items)):
        return value
    if kind is dict:
        return dict(zip(value, made))
    if kind is np.ndarray:
        return np.fromiter(made, dtype=object, count=len(made)).reshape(value.shape)
    return kind(made)


KEY = "__verl__"
_PLAIN = frozenset({str, bool, int, float, type(None)})
_TOO_LONG = 2**4096  # larger integers are not written in decimal, which Python limits


def column_to_json(what: str, column: np.ndarray, source: Source | None = None) -> list[Any]:
    """Encode the values of a column in JSON types, one per row.

    Args:
        what: name of the column, for messages.
        column: object array.
        source: the function that made it.
    Raises:
        DataProtoValidationError: a value cannot be encoded; names the first row and the location in it.
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
    """Encode a value in JSON types.

    Raises:
        DataProtoValidationError: a part of it cannot be encoded; names its location.
    """
    try:
        return _encoded(what, value)
    except RecursionError:
        raise DataProtoValidationError(f"{what} contains itself, or is nested too deeply to be saved.") from None


def dumps(value: Any) -> str:
    """JSON types as a text."""
    return json.dumps(value)


def loads(text: str | bytes) -> Any:
    """Decode a text of `dumps`."""
    return json.loads(text, object_hook=_decoded if _mentions_key(text) else None)


def _mentions_key(text: str | bytes) -> bool:
    return (KEY.encode() in text) if isinstance(text, bytes) else (KEY in text)


def _encoded(what: str, value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not int or -_TOO_LONG < value < _TOO_LONG else {KEY: ["integer", hex(value)]}
    if isinstance(value, np.generic):
        return _encoded_scalar(what, value)
    if isinstance(value, (str, int, float)):  # subclasses such as enumeration members, as their base type
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
    """Whether all values are native JSON values."""
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


Packed = list[tuple[str, str, tuple[int, ...], np.ndarray]]

# Entry of the file with everything except tensors, as UTF-8 JSON.
_REST = "__rest__"
# Other dtypes are stored as raw bytes.
_SAFETENSORS_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
     torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)  # fmt: skip


def to_buffers(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Name, dtype, shape and raw bytes of each tensor.

    torch pickles the whole storage of a view, so that a part of a batch would be as large as the batch.
    """
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw_bytes(tensor).numpy())
        for name, tensor in tensors.items()
    ]


def from_buffers(packed: Packed) -> dict[str, torch.Tensor]:
    """Inverse of `to_buffers`, on the CPU and without gradients."""
    return {
        name: from_bytes(raw if raw.flags.writeable else raw.copy(), getattr(torch, dtype), shape)
        for name, dtype, shape, raw in packed
    }


def write_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    sources: Mapping[str, Source],
) -> None:
    """Write a file atomically."""
    from safetensors.torch import save_file

    entries, order = {}, []
    for number, (name, tensor) in enumerate(tensors.items()):
        key = f"__field_{number}__" if name.startswith("__") else name
        is_kept = tensor.dtype in _SAFETENSORS_DTYPES
        # safetensors refuses tensors that share memory, as parts of a batch may
        entries[key] = (in_order(tensor) if is_kept else raw_bytes(tensor)).clone()
        form = {} if is_kept else {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        order.append([name, key, form] if form or key != name else name)
    rest = {
        "columns": [
            (name, column_to_json(f"column `{name}`", array, sources.get(name))) for name, array in arrays.items()
        ],
        "meta_info": to_json("meta_info", dict(meta_info)),
        "sources": list(sources.items()),
        "order": order,
    }
    text = torch.from_numpy(np.frombuffer(bytearray(dumps(rest).encode()), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    save_file({**entries, _REST: text}, unfinished)
    os.replace(unfinished, path)


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], dict[str, Source]]:
    """Read tensors, columns, meta_info and sources from a file of `write_file`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise DataProtoValidationError(f"There is no saved batch at {path}.")
    try:
        entries = load_file(path)
        rest = loads(bytes(entries.pop(_REST).numpy()))
        tensors = {}
        for place in rest["order"]:
            name, key, form = (place, place, {}) if isinstance(place, str) else place
            entry = entries[key]
            dtype = getattr(torch, form["dtype"]) if form else entry.dtype
            tensors[name] = from_bytes(entry.numpy(), dtype, form["shape"]) if form else entry
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataProtoValidationError(
            f"{path} is not a batch that DataProto.save wrote, or it is damaged: {error}"
        ) from error
    columns, made_by = dict(rest["columns"]), dict(rest["sources"])  # dicts in files of earlier versions, now pairs
    arrays = {name: np.fromiter(column, dtype=object, count=len(column)) for name, column in columns.items()}
    sources = {name: Source(*source) for name, source in made_by.items()}
    return tensors, arrays, rest["meta_info"], sources
