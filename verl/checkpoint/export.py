"""Export of a checkpoint: a component as a Hugging Face directory, or the whole checkpoint without deltas.

An export is atomic and its bytes are hashed. `plain_directory` writes a component once for all processes of a machine,
below the temporary directory, and removes it when no process uses it any more.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import (
    FileHandle,
    FileSystem,
    files_below,
    make_directories,
    remove_tree,
    write_by_rename,
    write_errors,
    write_file,
)
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import COMMIT, MANIFEST, MANIFEST_LIMIT_BYTES, Manifest, commit_line
from verl.checkpoint.core.safetensors_format import INDEX_NAME, TensorBytes, render, render_shards
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import refuse_inside
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.read.verify import open_verified
from verl.errors import ConfigError
from verl.utils.orphan_cleanup import CLEANUP, LOCK, is_own_directory, make_own_directory, remove_unused
from verl.utils.progress import report

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


LOCK_TIMEOUT_S = 600.0  # without progress by the holder of the lock
LOOK_EVERY_S = 0.1

held_directories: dict[Path, FileHandle] = {}  # a shared lock on each directory, until this process ends
_roots: set[Path] = set()  # that this process leaves tidy


def plain_directory(published: Checkpoint, component: str, disk: FileSystem | None = None) -> Path:
    """A directory of a component without deltas: the checkpoint's own, or else a verified copy.

    The copy takes the size of the component in the directory of temporary files (`TMPDIR`), in a directory of this user
    alone. One that another process has made is hashed before it is used.

    Raises:
        CheckpointCorrupt: bytes are not those that were written.
        CheckpointWriteFailed: there is no room for the copy, or another process holds the lock and does nothing, or
            somebody else has put something where the copies go.
    """
    disk = disk or FileSystem()
    if not any(entry.path.startswith(f"{component}/") for entry in published.manifest.deltas):
        return published.directory / component
    manifest = digest_of(disk.read(published.directory / MANIFEST, MANIFEST_LIMIT_BYTES))
    root = Path(tempfile.gettempdir()) / f"verl-plain-{os.getuid()}"
    copy = root / f"{manifest[:32]}-{component}"
    if copy in held_directories:
        return copy
    with write_errors(f"writing {component} of {published.directory} out to {copy}"):
        make_own_directory(root)
        if root not in _roots:
            _roots.add(root)
            CLEANUP.register(shared_directories=[root])  # before anything is made
            atexit.register(_release_copies, disk, root)
        lock = _locked(disk, root)
        try:
            _remove_unused(disk, root)
            if os.path.lexists(copy) and not _is_as_saved(published, component, copy, disk):
                _remove_altered(disk, copy)
            if not os.path.lexists(copy):
                _write_component(published, component, copy, disk)
            held_directories[copy] = disk.lock_waiting(copy, shared=True)  # only processes with the other lock lock it
        finally:
            disk.close(lock)
    return copy


def _locked(disk: FileSystem, root: Path) -> FileHandle:
    """Take the lock on the directory of all copies, which is created if missing.

    Raises:
        OSError: its holder has made no progress for too long.
    """
    idle_s, written, looked_at = 0.0, 0, time.monotonic()
    while True:
        make_own_directory(root)
        with contextlib.suppress(FileExistsError):
            disk.close(disk.create(root / LOCK))
        with contextlib.suppress(FileNotFoundError):  # its last user has removed it
            handle = disk.lock(root / LOCK)
            if handle is not None and _is_there(handle):
                return handle
            if handle is not None:
                disk.close(handle)
                continue
        time.sleep(LOOK_EVERY_S)
        now = time.monotonic()
        idle_s, looked_at = idle_s + min(now - looked_at, 2 * LOOK_EVERY_S), now
        with contextlib.suppress(FileNotFoundError):
            size = sum(files_below(disk, root)[0].values())
            idle_s, written = (idle_s, written) if size == written else (0.0, size)
        if idle_s > LOCK_TIMEOUT_S:
            reason = f"another process has locked it and written nothing for {LOCK_TIMEOUT_S:g} s; is it stopped?"
            raise OSError(errno.ETIMEDOUT, reason, str(root / LOCK))


def _is_there(handle: FileHandle) -> bool:
    """Whether the locked file still exists under its name."""
    try:
        return os.path.samestat(os.fstat(handle.fd), os.stat(handle.path))
    except FileNotFoundError:
        return False


def _is_as_saved(published: Checkpoint, component: str, copy: Path, disk: FileSystem) -> bool:
    """Whether a copy has exactly the files of the component, with equal bytes."""
    if not is_own_directory(copy):
        return False
    sizes, _ = files_below(disk, copy)
    files = CheckpointReader(published).files(component)
    entries = {entry.path.removeprefix(f"{component}/"): entry for entry in files}
    if sizes != {path: entry.size for path, entry in entries.items()}:
        return False
    for path, entry in entries.items():
        begin = 0
        for leaf in entry.leaves:
            if digest_of(disk.read_range(copy / path, begin, leaf.size)) != leaf.blake3:
                return False
            begin += leaf.size
            report()
    return True


def _remove_altered(disk: FileSystem, copy: Path) -> None:
    """Remove a copy that differs from the checkpoint, unless a process uses it."""
    if is_own_directory(copy):
        lock = disk.lock(copy)
        if lock is None:
            raise OSError(errno.EBUSY, "it was altered, and another process uses it", str(copy))
        disk.close(lock)
    remove_tree(disk, copy)
    log.warning("%s was modified: it is written again", copy)


def _write_component(published: Checkpoint, component: str, copy: Path, disk: FileSystem) -> None:
    reader = CheckpointReader(published, disk)
    staged = copy.with_name(f"{copy.name}.{secrets.token_hex(6)}")
    make_directories(disk, staged, copy.parent)
    try:
        for entry in reader.files(component):
            target = staged / entry.path.removeprefix(f"{component}/")
            make_directories(disk, target.parent, staged)
            write_file(disk, target, reader.pieces(entry.path))
        disk.rename(staged, copy)
    except BaseException:
        remove_tree(disk, staged)
        raise


def _release_copies(disk: FileSystem, root: Path) -> None:
    """Exit hook: release this process's copies, and remove those that no other process uses."""
    while held_directories:
        disk.close(held_directories.popitem()[1])
    remove_unused(root)


def _remove_unused(disk: FileSystem, root: Path) -> None:
    """Remove copies of processes that have ended."""
    for name in disk.names(root):
        if name == LOCK:
            continue
        with contextlib.suppress(OSError):
            lock = disk.lock(root / name)
            if lock is not None:
                remove_tree(disk, root / name)
                disk.close(lock)


def materialize(reader: CheckpointReader, out: Path, disk: FileSystem | None = None) -> Checkpoint:
    """Write a checkpoint without deltas, atomically. Its `manifest_checksum` is that of the original.

    >>> whole = materialize(CheckpointManager("checkpoints/latest").reader(), Path("whole"))

    Args:
        reader: of the checkpoint, on a disk or in object storage.
        out: must not exist, or be an empty directory.
    Raises:
        ConfigError: `out` is in use.
        CheckpointCorrupt: bytes are not those that were written; nothing is left at `out`.
        CheckpointWriteFailed: the file system refused.
    """
    disk = disk or FileSystem()
    out, published = require_unused(disk, out), reader.published
    with atomic_directory(disk, out, f"writing {published.name} out to {out}") as staged:
        _write_whole_files(reader, staged, disk)
        open_verified(disk, staged, "full")
    return Checkpoint(out, _whole(published.manifest))


def _write_whole_files(reader: CheckpointReader, staged: Path, disk: FileSystem) -> None:
    for entry in reader.files():
        target = staged / entry.path
        make_directories(disk, target.parent, staged)
        write_file(disk, target, reader.pieces(entry.path))
    data = _whole(reader.published.manifest).to_bytes()
    write_by_rename(disk, staged / MANIFEST, data)
    write_by_rename(disk, staged / COMMIT, commit_line(data))


def _whole(manifest: Manifest) -> Manifest:
    files = tuple(replace(entry, linked_from=None) for entry in manifest.contents.values())
    return replace(manifest, files=files, deltas=())


MODEL, ADAPTER = "config.json", "adapter_config.json"


def export(manager: CheckpointManager, out: Path, component: str = "actor", pytorch_bin: bool = False) -> list[str]:
    """Write a component as a directory for transformers, or for peft if it is an adapter. The operation is atomic.

    >>> export(CheckpointManager("checkpoints"), Path("model"))
    ['config.json', 'model.safetensors']

    Args:
        out: must not exist, or be an empty directory.
        pytorch_bin: one `pytorch_model.bin`, a plain state dict that `torch.load(weights_only=True)` reads, instead of
            safetensors.
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
        for name, content in _content(manager, component, kind, pytorch_bin):
            target = staged / name
            make_directories(disk, target.parent, staged)
            _write_exported(disk, target, content)
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
    # Weights are rewritten, so that slices of several writers become whole tensors.
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


def _write_exported(disk: FileSystem, target: Path, content: list[Any] | Mapping) -> None:
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
    """A file object for torch.save, so that the state is not held in memory twice."""

    def __init__(self, disk: FileSystem, handle: FileHandle):
        self._disk, self._handle = disk, handle

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while rest:
            rest = rest[self._disk.write(self._handle, rest) :]
        return len(view)

    def flush(self) -> None:
        """No effect: writes are not buffered."""
