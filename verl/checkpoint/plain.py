"""A component as a directory that other libraries open, where its files are stored as differences: written once for
all processes of a machine, below the directory of temporary files, and removed when nobody uses it any more, also where
the last that did was killed."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import tempfile
import time
from pathlib import Path

from verl.checkpoint.disk import Disk, Handle
from verl.checkpoint.files import files_below, make_directories, remove_tree, write_errors, write_file
from verl.checkpoint.hashing import digest_of
from verl.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT_BYTES
from verl.checkpoint.published import Published
from verl.checkpoint.reader import CheckpointReader
from verl.utils.orphan_cleanup import CLEANUP, LOCK, remove_unused

LOCK_TIMEOUT_S = 600.0  # without a byte more by whoever has the lock
LOOK_EVERY_S = 0.1

_in_use: dict[Path, Handle] = {}  # a shared lock on each directory, until this process ends
_roots: set[Path] = set()  # that this process leaves tidy


def plain_directory(published: Published, component: str, disk: Disk | None = None) -> Path:
    """Where a component lies with every file whole: in the checkpoint itself, or else a copy, hashed on its way.

    The copy takes the size of the component in the directory of temporary files (`TMPDIR`).

    Raises:
        CheckpointCorrupt: bytes are not those that were written.
        CheckpointWriteFailed: there is no room for the copy, or another process holds the lock and does nothing.
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
        if root not in _roots:
            _roots.add(root)
            CLEANUP.register(shared_directories=[root])  # before anything is made
            atexit.register(_let_go, disk, root)
        lock = _locked(disk, root)
        try:
            _remove_unused(disk, root)
            if not copy.is_dir():
                _write(published, component, copy, disk)
            _in_use[copy] = disk.lock_waiting(copy, shared=True)  # nobody else locks it without the other lock
        finally:
            disk.close(lock)
    return copy


def _locked(disk: Disk, root: Path) -> Handle:
    """The lock on the directory of all copies, which is made where it is not there.

    Raises:
        OSError: who has it has written nothing for too long.
    """
    idle_s, written, looked_at = 0.0, 0, time.monotonic()
    while True:
        make_directories(disk, root, root.parent)
        os.chmod(root, 0o700)
        with contextlib.suppress(FileExistsError):
            disk.close(disk.create(root / LOCK))
        with contextlib.suppress(FileNotFoundError):  # whoever had it last has taken all away
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
            told = f"another process has locked it and written nothing for {LOCK_TIMEOUT_S:g} s; is it stopped?"
            raise OSError(errno.ETIMEDOUT, told, str(root / LOCK))


def _is_there(handle: Handle) -> bool:
    """Whether the file that was locked still has its name."""
    try:
        return os.path.samestat(os.fstat(handle.fd), os.stat(handle.path))
    except FileNotFoundError:
        return False


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
    remove_unused(root)


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
