"""Whole files: written and made durable, duplicated at the least cost, removed with all that is below them."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from verl.checkpoint.disk import NO_CLONE, NO_LINK, Disk, Handle
from verl.checkpoint.hashing import Leaf, LeafHasher, blocks, flat_view
from verl.errors import CheckpointReadFailed, CheckpointWriteFailed, NoSpaceForCheckpoint, VerlError


def write_file(disk: Disk, path: Path, buffers: Iterable[Any]) -> tuple[Leaf, ...]:
    """Write a new file from buffers and make its content durable (its name is durable once its directory is synced).

    The buffers in memory are hashed, not what a later read would return, so that damage on the way to the disk shows.

    Raises:
        OSError: the file is to be abandoned; a second attempt must use another name.
    """
    hasher = LeafHasher()

    def fill(handle: Handle) -> None:
        for buffer in buffers:
            for block in blocks(flat_view(buffer)):
                hasher.update(block)
                _write_all(disk, handle, block)
            hasher.cut()

    _create_filled(disk, path, fill)
    return tuple(hasher.leaves)


def write_by_rename(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file so that its name, once there, always leads to all of it. Syncs the file, not the directory."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_file(disk, temporary, [data])
    except FileExistsError:  # a process was killed here once
        disk.unlink(temporary)
        write_file(disk, temporary, [data])
    disk.rename(temporary, path)


def duplicate(disk: Disk, source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`, or a clone where the file system cannot link.

    Returns:
        False where it can do neither; nothing is left at `target` then, and the bytes are to be copied.
    """
    try:
        disk.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return clone(disk, source, target)
    return True


def clone(disk: Disk, source: Path, target: Path) -> bool:
    """Let `target` share the blocks of `source` until either changes. False where the file system cannot."""
    try:
        _create_filled(disk, target, lambda handle: disk.clone(handle, source))
    except OSError as error:
        if error.errno not in NO_CLONE:
            raise
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(target)
        return False
    return True


@contextlib.contextmanager
def write_errors(doing: str) -> Iterator[None]:
    """What the file system refuses inside is raised as an error of the checkpoint, with what was being done.

    Raises:
        NoSpaceForCheckpoint: the disk or the quota is full.
        CheckpointWriteFailed: anything else.
    """
    try:
        yield
    except VerlError:  # of a checkpoint, or of a store
        raise
    except OSError as error:
        kind = NoSpaceForCheckpoint if error.errno in (errno.ENOSPC, errno.EDQUOT) else CheckpointWriteFailed
        where = f" ({error.filename})" if error.filename else ""
        raise kind(f"{doing} failed: {error.strerror or error}{where}. Earlier checkpoints are untouched") from error


@contextlib.contextmanager
def read_errors(doing: str) -> Iterator[None]:
    """The same where something is only looked at.

    Raises:
        CheckpointReadFailed: the file system refused.
    """
    try:
        yield
    except VerlError:  # of a checkpoint, or of a store
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointReadFailed(f"{doing} failed: {error.strerror or error}{where}") from error


def make_directories(disk: Disk, path: Path, below: Path) -> None:
    """Make `path` and what lacks between it and `below`, which exists. Others may be making the same."""
    missing = [path, *path.parents]
    for directory in reversed(missing[: missing.index(below)]):
        with contextlib.suppress(FileExistsError):
            disk.make_directory(directory)


def is_directory(disk: Disk, path: Path) -> bool:
    """Whether this is a directory itself, not a symbolic link to one."""
    try:
        return stat.S_ISDIR(disk.status(path).st_mode)
    except FileNotFoundError:
        return False


def files_below(disk: Disk, root: Path) -> tuple[dict[str, int], list[Path]]:
    """Every file by its path relative to `root`, with its size, and every directory, leaves first, `root` last."""
    sizes: dict[str, int] = {}
    directories: list[Path] = []

    def visit(directory: Path) -> None:
        for name in disk.names(directory):
            path = directory / name
            status = disk.status(path)
            if stat.S_ISDIR(status.st_mode):
                visit(path)
            else:
                # A symbolic link or a device has no content of its own: a size that matches no file.
                sizes[path.relative_to(root).as_posix()] = status.st_size if stat.S_ISREG(status.st_mode) else -1
        directories.append(directory)

    visit(root)
    return sizes, directories


def remove_tree(disk: Disk, root: Path) -> int:
    """Remove a directory with all below it, or a file; what is gone already does not matter. Returns bytes freed."""
    if not is_directory(disk, root):
        return _remove_file(disk, root)
    freed = remove_content(disk, root)
    with contextlib.suppress(FileNotFoundError):
        disk.remove_directory(root)
    return freed


def remove_content(disk: Disk, directory: Path) -> int:
    """Remove what lies in a directory, which may be missing. Others may be doing the same. Returns bytes freed."""
    try:
        names = disk.names(directory)
    except FileNotFoundError:
        return 0
    return sum(remove_tree(disk, directory / name) for name in names)


def _remove_file(disk: Disk, path: Path) -> int:
    try:
        status = disk.status(path)
        disk.unlink(path)
    except FileNotFoundError:
        return 0
    return status.st_size if status.st_nlink == 1 else 0


def _create_filled(disk: Disk, path: Path, fill: Callable[[Handle], None]) -> None:
    handle = disk.create(path)
    try:
        fill(handle)
        disk.sync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.close(handle)
        raise
    disk.close(handle)  # some file systems report a failed write only here


def _write_all(disk: Disk, handle: Handle, block: memoryview) -> None:
    while block:
        written = disk.write(handle, block)
        if written <= 0:
            raise OSError(errno.EIO, "a write took no bytes", str(handle.path))
        block = block[written:]
