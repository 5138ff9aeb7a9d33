"""Export of a component of a checkpoint as a Hugging Face directory; it is atomic, and its bytes are hashed."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.checkpoint.core.filesystem import (
    FileSystem,
    files_below,
    make_directories,
    remove_tree,
    write_errors,
    write_file,
)
from verl.checkpoint.core.manifest import LogicalTensor
from verl.checkpoint.core.safetensors_format import INDEX_NAME, MODEL_METADATA, lay_out, model_files
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import refuse_inside
from verl.errors import ConfigError

log = logging.getLogger(__name__)


def require_unused(disk: FileSystem, out: Path) -> Path:
    """Check an output directory and return its absolute path.

    Raises:
        ConfigError: it exists and is not empty, or is inside a checkpoint.
    """
    out = Path(os.path.abspath(out))
    refuse_inside(out, "OUT")
    if os.path.lexists(out) and not (out.is_dir() and not disk.names(out)):
        raise ConfigError(f"OUT is {out}: there is something already. Give a directory that does not exist yet.")
    return out


@contextlib.contextmanager
def atomic_directory(disk: FileSystem, out: Path, doing: str) -> Iterator[Path]:
    """Context with a directory to fill, which is synced and renamed to `out` at the end; after an error it is removed.

    Args:
        out: see `require_unused`.
        doing: description of the operation, for errors of the file system.
    Raises:
        CheckpointWriteFailed: the file system refused.
    """
    staged = out.with_name(f".{out.name}-{secrets.token_hex(6)}")
    with write_errors(doing):
        make_directories(disk, out.parent, next(path for path in out.parents if path.is_dir()))
        make_directories(disk, staged, out.parent)
        try:
            yield staged
            for directory in files_below(disk, staged)[1]:
                disk.sync_directory(directory)
            disk.rename(staged, out)
        except BaseException:
            remove_tree(disk, staged)
            raise
        disk.sync_directory(out.parent)


MODEL, ADAPTER = "config.json", "adapter_config.json"


def export(manager: CheckpointManager, out: Path, component: str = "actor") -> list[str]:
    """Write a component as a directory for transformers, or for peft if it is an adapter. The operation is atomic.

    >>> export(CheckpointManager("checkpoints"), Path("model"))
    ['config.json', 'model.safetensors']

    Args:
        out: must not exist, or be an empty directory.
    Returns:
        The names of the files.
    Raises:
        ConfigError: the component is not a model, or `out` is in use.
        CheckpointCorrupt: bytes are not those that were written; nothing is left at `out`.
        CheckpointWriteFailed: the file system refused.
    """
    disk = FileSystem()
    out = require_unused(disk, out)
    kind = _kind(manager, component)
    with atomic_directory(disk, out, f"exporting to {out}") as staged:
        for name, content in _content(manager, component, kind):
            target = staged / name
            make_directories(disk, target.parent, staged)
            write_file(disk, target, content)
        return sorted(files_below(disk, staged)[0])


def _kind(manager: CheckpointManager, component: str) -> str:
    present = {entry.path for entry in manager.files(component)}
    for kind in (ADAPTER, MODEL):
        if f"{component}/{kind}" in present:
            return kind
    models = [
        path.split("/")[0] for path in (entry.path for entry in manager.files()) if path.endswith((MODEL, ADAPTER))
    ]
    known = ", ".join(sorted(set(models))) or "none"
    raise ConfigError(f"component is {component!r}: {manager.directory} has no model there. Its models: {known}.")


def _content(manager: CheckpointManager, component: str, kind: str) -> Iterator[tuple[str, list[Any]]]:
    """Files by name, each in buffers."""
    held, reader = manager.checkpoint.slices_by_file, manager.reader()
    recorded = reader.tensors(component)
    for entry in manager.files(component):
        name = entry.path.removeprefix(f"{component}/")
        if entry.path not in held and (name != INDEX_NAME or not recorded):
            yield name, [manager.read(entry.path)]
    if not recorded:
        return
    # Weights are rewritten, so that slices of several writers become whole tensors.
    whole = {t.name: LogicalTensor.of_slice(component, t.name, t.dtype, t.shape) for t in recorded}
    (files,), index = model_files([{name: tensor.num_bytes for name, tensor in whole.items()}])
    if kind == ADAPTER:
        files, index = {"adapter_model.safetensors": list(whole)}, None
    for file, names in files.items():
        header, ordered = lay_out(file, [whole[name] for name in names], MODEL_METADATA)
        yield file, [header, *(reader.tensor(component, tensor.name) for tensor in ordered)]
    if index is not None:
        yield INDEX_NAME, [index]
