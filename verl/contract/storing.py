"""A batch as bytes: raw buffers for the trip to another process, one safetensors file with JSON for the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.contract.source import Source
from verl.errors import DataProtoValidationError

Packed = list[tuple[str, str, tuple[int, ...], np.ndarray]]

# The entry of the file that holds all but the tensors, as UTF-8 JSON.
_REST = "__rest__"


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Name, dtype, shape and raw bytes of each tensor.

    A tensor pickled by torch takes its whole storage along, so that a part of a batch would weigh as much as the batch.
    """
    packed = []
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().reshape(-1)
        packed.append(
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())
        )
    return packed


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    """The tensors of `pack`, on the CPU and without gradients."""
    tensors = {}
    for name, dtype, shape, raw in packed:
        raw = raw if raw.flags.writeable else raw.copy()
        tensors[name] = torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)
    return tensors


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    sources: Mapping[str, Source],
) -> None:
    """Write one file, whole or not at all."""
    from safetensors.torch import save_file

    rest = {
        "columns": {name: _json(f"column `{name}`", array.tolist()) for name, array in arrays.items()},
        "meta_info": _json("meta_info", dict(meta_info)),
        "sources": dict(sources),
        "order": list(tensors),
    }
    text = torch.from_numpy(np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8).copy())
    # safetensors refuses tensors that share memory, as the parts of a batch do
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    save_file({**own, _REST: text}, unfinished)
    os.replace(unfinished, path)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], dict[str, Source]]:
    """Tensors, columns, meta_info and sources of a file that `write` made."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise DataProtoValidationError(f"There is no saved batch at {path}.")
    try:
        tensors = load_file(path)
        rest = json.loads(bytes(tensors.pop(_REST).numpy()))
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise DataProtoValidationError(
            f"{path} is no batch that DataProto.save wrote, or it is damaged: {error}"
        ) from error
    arrays = {name: np.fromiter(column, dtype=object, count=len(column)) for name, column in rest["columns"].items()}
    sources = {name: Source(*source) for name, source in rest["sources"].items()}
    return {name: tensors[name] for name in rest["order"]}, arrays, rest["meta_info"], sources


def _json(what: str, value: Any) -> Any:
    """The value in plain JSON types.

    Raises:
        DataProtoValidationError: naming the place within `value` that JSON cannot hold.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _json(what, value.tolist())
    if isinstance(value, (list, tuple)):
        return [_json(f"{what}[{place}]", item) for place, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(f"{what}[{key!r}]", item) for key, item in value.items()}
    found = "a dict whose keys are not all texts" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise DataProtoValidationError(
        f"{what} is {found}, which JSON cannot hold: a batch is saved without pickle, so columns and meta_info may "
        "hold numbers, texts, booleans, null, lists, and dicts with text keys. Convert it, or leave it out with "
        "select(...)."
    )
