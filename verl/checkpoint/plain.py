"""A component as a directory that other libraries open, where its files are stored as differences: written once for
all processes of a machine, below the directory of temporary files, and removed when nobody uses it any more."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from verl.checkpoint.disk import Disk, Handle
from verl.checkpoint.files import make_directories, remove_tree, write_errors, write_file
from verl.checkpoint.hashing import digest_of
from verl.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT_BYTES
from verl.checkpoint.published import Published
from verl.checkpoint.reader import CheckpointReader

LOCK = "lock"

_in_use: dict[Path, Handle] = {}  # a shared lock on each directory, until this process ends


def plain_directory(published: Published, component: str, disk: Disk | None = None) -> Path:
    """Where a component lies with every file whole: in the checkpoint itself, or else a copy, hashed on its way.

    The copy takes the size of the component in the directory of temporary files (`TMPDIR`).

    Raises:
        CheckpointCorrupt: bytes are not those that were written.
        CheckpointWriteFailed: there is no room for the copy.
    """
    disk = disk or Disk()
    if not any(entry.path.startswith(f"{component}/") for entry in published.manifest.deltas):
        return published.directory / component
    manifest = digest_of(disk.read(published.directory / MANIFEST, MANIFEST_LIMIT_BYTES))
    root = Path(tempfile.gettempdir()) / f"verl-plain-{os.getuid()}"
    copy = root / f"{manifest[:32]}-{component}"
    if copy in _in_use:
        return copy
    with write_errors(f"writing {component} of {published.directory} out to {copy}"):
        make_directories(disk, root, root.parent)
        os.chmod(root, 0o700)
        with contextlib.suppress(FileExistsError):
            disk.close(disk.create(root / LOCK))
        lock = disk.lock_waiting(root / LOCK)
        try:
            _remove_unused(disk, root)
            if not copy.is_dir():
                _write(published, component, copy, disk)
            if not _in_use:
                atexit.register(_let_go, disk, root)
            _in_use[copy] = disk.lock_waiting(copy, shared=True)
        finally:
            disk.close(lock)
    return copy


def _write(published: Published, component: str, copy: Path, disk: Disk) -> None:
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


def _let_go(disk: Disk, root: Path) -> None:
    """At the end of this process; what others use stays, and who comes next looks again."""
    while _in_use:
        disk.close(_in_use.popitem()[1])
    with contextlib.suppress(OSError):
        lock = disk.lock(root / LOCK)
        if lock is not None:
            _remove_unused(disk, root)
            disk.close(lock)


def _remove_unused(disk: Disk, root: Path) -> None:
    """What processes left that have ended."""
    for name in disk.names(root):
        if name == LOCK:
            continue
        with contextlib.suppress(OSError):
            lock = disk.lock(root / name)
            if lock is not None:
                remove_tree(disk, root / name)
                disk.close(lock)
