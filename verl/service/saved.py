"""Saved training sessions: a directory of peft with the optimizer and a record, every file with its digest.

adapter_config.json, adapter_model.safetensors     opens with peft
optimizer.safetensors                               moments, by parameter
session.json                                        the adapter, counters, digests; written last
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.export import atomic_directory, require_unused
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import quiet_transformers
from verl.utils.external_input import ExternalInputError, parse_as

if TYPE_CHECKING:
    from verl.service.adapters import BaseModel

RECORD, OPTIMIZER, ADAPTER = "session.json", "optimizer.safetensors", "adapter_model.safetensors"


@dataclass(frozen=True)
class SessionRecord:
    """The content of `session.json`.

    Attributes:
        lora: fields of the adapter's `LoRA`.
        updates, samplings: optimizer steps made, and calls of `sample`.
        base: digest of the base model.
        digests: of the other files by name. Without the optimizer the directory is for sampling alone.
    """

    lora: dict[str, Any]
    updates: int
    samplings: int
    base: str
    digests: dict[str, str]
    format: Literal[1] = 1

    @property
    def adapter(self) -> LoRA:
        return LoRA(**self.lora)


def write(
    directory: Path, base: BaseModel, name: str, record: SessionRecord, optimizer: Mapping[str, Tensor] | None
) -> None:
    """Write a session to a directory that does not exist yet; it appears with all of its content or not at all.

    Args:
        base, name: the adapter.
        record: of the session; its digests are made here.
        optimizer: its tensors; None for a directory for sampling alone.
    Raises:
        ConfigError: the directory exists.
    """
    disk = FileSystem()
    out = require_unused(disk, directory)
    with atomic_directory(disk, out, f"saving to {out}") as staged, quiet_transformers():
        base.model.peft_config[name].save_pretrained(staged)
        for file, tensors in ((ADAPTER, base.weights(name)), (OPTIMIZER, optimizer)):
            if tensors is not None:
                content = {key: x.detach().cpu().contiguous() for key, x in sorted(tensors.items())}
                (staged / file).write_bytes(tensor_bytes(content))
        digests = {path.name: digest_of(path.read_bytes()) for path in sorted(staged.iterdir())}
        values = dataclasses.asdict(dataclasses.replace(record, digests=digests))
        (staged / RECORD).write_text(json.dumps(values, indent=1) + "\n")


def read_record(directory: Path, base: BaseModel) -> SessionRecord:
    """The record of a saved session of a base model.

    Raises:
        ConfigError: there is none, it is damaged, or that of another base model.
    """
    try:
        record = parse_as(SessionRecord, (directory / RECORD).read_bytes())
    except (OSError, ExternalInputError) as error:
        raise ConfigError(f"{directory / RECORD} is no record of a saved session: {error}.") from error
    if record.base != base.digest:
        raise ConfigError(f"{directory} holds an adapter of another base model.")
    return record


def read_tensors(directory: Path, name: str, record: SessionRecord) -> dict[str, Tensor]:
    """The tensors of a file; every byte is verified.

    Raises:
        ConfigError: it is not there, or damaged; names it.
    """
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{directory / name} cannot be read: {error.strerror}.") from error
    if digest_of(content) != record.digests.get(name):
        raise ConfigError(f"{directory / name} is damaged: its content is not what was saved.")
    return load_tensors(content)
