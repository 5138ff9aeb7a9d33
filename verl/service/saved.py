"""Saved training sessions: a directory of peft with the optimizer and a record, every file with its digest.

adapter_config.json, adapter_model.safetensors     opens with peft
optimizer.safetensors                               moments, by parameter
session.json                                        shape, counters, digests; written last
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.export import atomic_directory, require_unused
from verl.errors import ConfigError
from verl.models.pretrained import quiet_transformers
from verl.service.adapters import AdapterShape
from verl.utils.external_input import ExternalInputError, parse_mapping

if TYPE_CHECKING:
    from verl.service.adapters import BaseModel

RECORD, OPTIMIZER = "session.json", "optimizer.safetensors"
ADAPTER = "adapter_model.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class SavedSession:
    """The state of a session.

    Attributes:
        shape: of the adapter.
        weights, optimizer: tensors by name.
        updates, samplings: optimizer steps made, and calls of `sample`.
        base: digest of the base model.
        has_optimizer: whether the optimizer was saved.
    """

    shape: AdapterShape
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    updates: int
    samplings: int
    base: str
    has_optimizer: bool = True


def write(state: SavedSession, directory: Path, base: BaseModel, name: str, *, optimizer: bool = True) -> None:
    """Write a session to a directory that does not exist yet; it appears with all of its content or not at all.

    Args:
        base, name: of the session.
        optimizer: without it the directory is for sampling alone.
    Raises:
        ConfigError: the directory exists.
    """
    disk = FileSystem()
    out = require_unused(disk, directory)
    with atomic_directory(disk, out, f"saving to {out}") as staged, quiet_transformers():
        base.model.peft_config[name].save_pretrained(staged)
        (staged / ADAPTER).write_bytes(_bytes_of(state.weights))
        base.tokenizer.save_pretrained(staged)
        if optimizer:
            (staged / OPTIMIZER).write_bytes(_bytes_of(state.optimizer))
        record = {
            "format": FORMAT,
            "shape": dataclasses.asdict(state.shape),
            "updates": state.updates,
            "samplings": state.samplings,
            "base": state.base,
            "digests": {path.name: digest_of(path.read_bytes()) for path in sorted(staged.iterdir())},
        }
        (staged / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _bytes_of(tensors: Mapping[str, Tensor]) -> bytes:
    return tensor_bytes({name: x.detach().cpu().contiguous() for name, x in sorted(tensors.items())})


def read_record(directory: Path) -> dict[str, Any]:
    """The record of a saved session.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    try:
        record = parse_mapping((directory / RECORD).read_bytes())
    except OSError as error:
        raise ConfigError(f"{directory} holds no saved session ({error.strerror}): it has no {RECORD}.") from error
    except ExternalInputError as error:
        raise ConfigError(f"{directory / RECORD} is damaged: {error}.") from error
    if record.get("format") != FORMAT:
        raise ConfigError(f"{directory / RECORD} is of format {record.get('format')!r}: this version reads {FORMAT}.")
    return record


def read(directory: Path) -> SavedSession:
    """Read a saved session; every byte is verified.

    Raises:
        ConfigError: the directory holds none, or a file is damaged; names it.
    """
    record = read_record(directory)
    try:
        shape, weights = AdapterShape(**record["shape"]), _verified(directory, ADAPTER, record["digests"])
        has_optimizer = OPTIMIZER in record["digests"]
        optimizer = _verified(directory, OPTIMIZER, record["digests"]) if has_optimizer else {}
        counters = int(record["updates"]), int(record["samplings"])
        return SavedSession(shape, weights, optimizer, *counters, str(record["base"]), has_optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{directory / RECORD} is damaged: {type(error).__name__}: {error}.") from error


def _verified(directory: Path, name: str, digests: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{directory / name} cannot be read: {error.strerror}.") from error
    if digest_of(content) != digests[name]:
        raise ConfigError(f"{directory / name} is damaged: its content is not what was saved.")
    return load_tensors(content)
