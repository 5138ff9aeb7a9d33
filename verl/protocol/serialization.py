"""Serialization of batches: raw buffers for other processes, one safetensors file with JSON for the disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.errors import DataProtoValidationError
from verl.protocol.provenance import Source


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU without gradient; shares memory if the tensor is already contiguous there."""
    return tensor.detach().to("cpu").resolve_neg().contiguous()


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


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as a leaf tensor, which requires gradients if the original does."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


JSON_VALUES = "JSON values: numbers, strings, booleans, None, and lists and dicts of these with strings as keys"
PLAIN = frozenset({str, bool, int, float, type(None)})


class NotJson(Exception):
    """A value is not a JSON value.

    Attributes:
        value: the part of it that is none.
        path: location of the part, such as `['turns'][2]`.
        kind: what the part is, for messages.
    """

    def __init__(self, value: Any, kind: str = ""):
        self.value, self.path = value, ""
        if not kind and isinstance(value, (np.ndarray, torch.Tensor)):
            kind = f"a {type(value).__name__} of {value.dtype}"
        elif not kind and isinstance(value, dict):
            kind = "a dict whose keys are not all strings"
        self.kind = kind or f"a value of type {type(value).__name__}"

    def inside(self, key: Any) -> NotJson:
        self.path = f"[{key!r}]{self.path}"
        return self


def json_value(value: Any) -> Any:
    """The value, with numbers and arrays of NumPy as Python numbers and lists, and tuples as lists.

    Raises:
        NotJson: it has another part, or contains itself.
    """
    try:
        return _json_value(value)
    except RecursionError:
        raise NotJson(value, "a value that contains itself, or is nested too deeply") from None


def _json_value(value: Any) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        if value.dtype.kind not in "biufUO" or value.dtype == np.longdouble:
            raise NotJson(value)
        return _json_value(value.tolist())
    if isinstance(value, (list, tuple)):
        keys, items = range(len(value)), value
    elif isinstance(value, dict) and all(type(key) is str for key in value):
        keys, items = value.keys(), value.values()
    else:
        raise NotJson(value)
    is_unchanged = type(value) in (list, dict)
    if is_unchanged and set(map(type, items)) <= PLAIN:
        return value
    converted = []
    for key, item in zip(keys, items):
        try:
            converted.append(_json_value(item))
        except NotJson as error:
            raise error.inside(key) from None
    if is_unchanged and all(new is old for new, old in zip(converted, items)):
        return value
    return dict(zip(keys, converted)) if isinstance(value, dict) else converted


def json_text(what: str, value: Any) -> str:
    """A value as JSON.

    Raises:
        DataProtoValidationError: it is not a JSON value; names the location of the part that is none.
    """
    try:
        return json.dumps(json_value(value))
    except NotJson as error:
        reason = f"{what}{error.path} is {error.kind}"
    except ValueError as error:  # an integer of more digits than Python writes
        reason = f"{what} cannot be written ({error})"
    raise DataProtoValidationError(
        f"{reason}: a batch is saved as tensors and {JSON_VALUES}. Convert it, or leave it out with select(...)."
    )


Packed = list[tuple[str, str, tuple[int, ...], np.ndarray]]

# Entry of the file with everything except tensors, as UTF-8 JSON.
_METADATA_KEY = "__rest__"


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
        # safetensors refuses tensors that share memory, as parts of a batch may
        entries[key] = in_order(tensor).clone()
        order.append([name, key])
    metadata = {
        "columns": [[name, array.tolist()] for name, array in arrays.items()],
        "meta_info": json.loads(json_text("meta_info", dict(meta_info))),
        "sources": list(sources.items()),
        "order": order,
    }
    text = torch.from_numpy(np.frombuffer(bytearray(json_text("batch", metadata).encode()), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    save_file({**entries, _METADATA_KEY: text}, unfinished)
    os.replace(unfinished, path)


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], dict[str, Source]]:
    """Read tensors, columns, meta_info and sources from a file of `write_file`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise DataProtoValidationError(f"There is no saved batch at {path}.")
    try:
        entries = load_file(path)
        metadata = json.loads(bytes(entries.pop(_METADATA_KEY).numpy()))
        tensors = {name: entries[key] for name, key in metadata["order"]}
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataProtoValidationError(
            f"{path} is not a batch that DataProto.save wrote, or it is damaged: {error}"
        ) from error
    arrays = {name: np.fromiter(column, dtype=object, count=len(column)) for name, column in metadata["columns"]}
    sources = {name: Source(*source) for name, source in metadata["sources"]}
    return tensors, arrays, metadata["meta_info"], sources
