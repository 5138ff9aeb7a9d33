"""A component of a checkpoint as a plain Hugging Face directory, hashed on its way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from verl.checkpoint.disk import Disk, Handle
from verl.checkpoint.files import files_below, make_directories, write_file
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.safetensors_bytes import INDEX_NAME, TensorBytes, render, render_shards
from verl.checkpoint.written_out import unused, written_out
from verl.errors import ConfigError

MODEL, ADAPTER = "config.json", "adapter_config.json"


def export(manager: CheckpointManager, out: Path, component: str = "actor", pytorch_bin: bool = False) -> list[str]:
    """Write a component so that transformers, or peft for an adapter, opens it. It appears whole or not at all.

    >>> export(CheckpointManager("checkpoints"), Path("model"))  # doctest: +SKIP
    ['config.json', 'model.safetensors', 'tokenizer.json']

    Args:
        out: must not exist, or be an empty directory.
        pytorch_bin: one `pytorch_model.bin`, a plain state dict that `torch.load(weights_only=True)` reads, instead of
            safetensors.
    Returns:
        The names of the files.
    Raises:
        ConfigError: the component is no model, or `out` is in use.
        CheckpointCorrupt: bytes are not those that were written; nothing is left at `out`.
        CheckpointWriteFailed: the file system refused.
    """
    disk = Disk()
    out = unused(disk, out)
    kind = _kind(manager, component)
    with written_out(disk, out, f"exporting to {out}") as staged:
        for name, content in _content(manager, component, kind, pytorch_bin):
            target = staged / name
            make_directories(disk, target.parent, staged)
            _write(disk, target, content)
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


def _content(
    manager: CheckpointManager, component: str, kind: str, pytorch_bin: bool
) -> Iterator[tuple[str, list[Any] | Mapping]]:
    """Files by name: buffers, or a state dict for torch to save."""
    held, reader = manager.published.slices_by_file, manager.reader()
    recorded = reader.tensors(component)
    if pytorch_bin and not recorded:
        raise ConfigError(
            f"component is {component!r}: {manager.directory} records no tensors of it to write as a state."
        )
    for entry in manager.files(component):
        name = entry.path.removeprefix(f"{component}/")
        if entry.path not in held and (name != INDEX_NAME or not recorded):
            yield name, [manager.read(entry.path)]
    # The weights are written anew, so that what many writers cut into slices comes out as whole tensors.
    if pytorch_bin:
        name = "adapter_model.bin" if kind == ADAPTER else "pytorch_model.bin"
        yield name, dict(manager.load(component))
        return
    if not recorded:
        return
    tensors = [
        TensorBytes(tensor.name, tensor.dtype, tensor.shape, reader.tensor(component, tensor.name))
        for tensor in recorded
    ]
    if kind == ADAPTER:
        yield "adapter_model.safetensors", list(render(tensors, {"format": "pt"}).buffers)
        return
    files, index = render_shards(tensors)
    for name, rendered in files.items():
        yield name, list(rendered.buffers)
    if index is not None:
        yield INDEX_NAME, [index]


def _write(disk: Disk, target: Path, content: list[Any] | Mapping) -> None:
    if not isinstance(content, Mapping):
        write_file(disk, target, content)
        return
    import torch

    handle = disk.create(target)
    try:
        torch.save(content, cast(IO[bytes], _Sink(disk, handle)))
        disk.sync(handle)
    finally:
        disk.close(handle)


class _Sink:
    """An open file as torch.save wants it: the state is never in memory twice."""

    def __init__(self, disk: Disk, handle: Handle):
        self._disk, self._handle = disk, handle

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while rest:
            rest = rest[self._disk.write(self._handle, rest) :]
        return len(view)

    def flush(self) -> None:
        """What is written is with the system already."""
