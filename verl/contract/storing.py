"""A batch as bytes: raw buffers for the trip to another process, one safetensors file with JSON for the disk.

The file holds each tensor under its field's name, and `__rest__`: a JSON object of the columns, meta_info, producers,
and the fields in order. A field whose name may mean something to the format lies there under a number instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.contract.json_values import column_to_json, dumps, loads, to_json
from verl.contract.source import Source
from verl.contract.tensor_bytes import from_bytes, in_order, raw_bytes
from verl.errors import DataProtoValidationError

Packed = list[tuple[str, str, tuple[int, ...], np.ndarray]]

# The entry of the file that holds all but the tensors, as UTF-8 JSON.
_REST = "__rest__"
# Of other dtypes the bytes are kept.
_SAFETENSORS_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
     torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)  # fmt: skip


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Name, dtype, shape and raw bytes of each tensor.

    A tensor pickled by torch takes its whole storage along, so that a part of a batch would weigh as much as the batch.
    """
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw_bytes(tensor).numpy())
        for name, tensor in tensors.items()
    ]


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    """The tensors of `pack`, on the CPU and without gradients."""
    return {
        name: from_bytes(raw if raw.flags.writeable else raw.copy(), getattr(torch, dtype), shape)
        for name, dtype, shape, raw in packed
    }


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    sources: Mapping[str, Source],
) -> None:
    """Write one file, whole or not at all."""
    from safetensors.torch import save_file

    entries, order = {}, []
    for number, (name, tensor) in enumerate(tensors.items()):
        key = f"__field_{number}__" if name.startswith("__") else name
        is_kept = tensor.dtype in _SAFETENSORS_DTYPES
        # safetensors refuses tensors that share memory, as the parts of a batch do
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


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], dict[str, Source]]:
    """Tensors, columns, meta_info and sources of a file that `write` made."""
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
            f"{path} is no batch that DataProto.save wrote, or it is damaged: {error}"
        ) from error
    columns, made_by = dict(rest["columns"]), dict(rest["sources"])  # objects in files of earlier versions, now pairs
    arrays = {name: np.fromiter(column, dtype=object, count=len(column)) for name, column in columns.items()}
    sources = {name: Source(*source) for name, source in made_by.items()}
    return tensors, arrays, rest["meta_info"], sources
