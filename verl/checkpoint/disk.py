"""Every file-system call of the checkpoint store, each one an operation that passes through one seam.

A test puts a `Disk` of its own in the place of this one, with another `perform`: it records the operations, lets one
of them fail, or ends the process before or after it, and everything else stays the real thing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl.utils.progress import report

T = TypeVar("T")

FICLONE = 0x40049409  # ioctl: let this file share the blocks of another one, until either is changed
NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
NO_CLONE = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM}
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # they say nothing about the file
NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
NO_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Handle:
    """An open file."""

    path: Path
    fd: int


@dataclass(frozen=True)
class Space:
    """What is free on a file system; `inodes` is None where their number has no limit."""

    bytes: int
    inodes: int | None


class Disk:
    """The file system. Each method is one operation and raises OSError as the system gives it."""

    def perform(self, operation: str, call: Callable[..., T], *args: Any) -> T:
        """Run one operation, which is a piece of work; the seam for tests. Nothing below reaches the file system in
        another way."""
        result = call(*args)
        report()
        return result

    def create(self, path: Path) -> Handle:
        """Open a file that must not exist yet."""
        return self.perform("create", _create, path)

    def create_direct(self, path: Path) -> Handle:
        """Open a file that must not exist yet, to be written past the page cache with `write_at`.

        Raises:
            OSError: one of NO_DIRECT where the file system cannot; an empty file may have been made.
        """
        return self.perform("create_direct", _create_direct, path)

    def write(self, handle: Handle, data: memoryview) -> int:
        """Write once; the number of bytes written may be less than those given."""
        return self.perform("write", _write, handle, data)

    def write_at(self, handle: Handle, data: memoryview, offset: int) -> int:
        """Write once at a place of the file; the number of bytes written may be less than those given."""
        return self.perform("write_at", _write_at, handle, data, offset)

    def truncate(self, handle: Handle, size: int) -> None:
        """Cut a file off."""
        self.perform("truncate", _truncate, handle, size)

    def clone(self, handle: Handle, source: Path) -> None:
        """Fill a new file with the blocks of another one (reflink)."""
        self.perform("clone", _clone, handle, source)

    def sync(self, handle: Handle) -> None:
        """Make the content of a file durable. After a failure the file must be given up: the kernel may have dropped
        the pages, and a second call would report success."""
        self.perform("sync", _sync, handle)

    def close(self, handle: Handle) -> None:
        """Close a file or give up a lock."""
        self.perform("close", _close, handle)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        self.perform("sync_directory", _sync_directory, path)

    def make_directory(self, path: Path) -> None:
        """Make a directory that must not exist yet."""
        self.perform("make_directory", os.mkdir, path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file replaces a file; a directory never replaces one that holds anything."""
        self.perform("rename", os.rename, source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        self.perform("link", _link, source, target)

    def symlink(self, pointing_to: str, path: Path) -> None:
        """Make a symbolic link."""
        self.perform("symlink", os.symlink, pointing_to, path)

    def unlink(self, path: Path) -> None:
        """Remove the name of a file."""
        self.perform("unlink", os.unlink, path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        self.perform("remove_directory", os.rmdir, path)

    def read(self, path: Path, limit: int) -> bytes:
        """A whole file of at most `limit` bytes.

        Raises:
            OSError: EFBIG where it is larger.
        """
        return self.perform("read", _read, path, limit)

    def read_range(self, path: Path, begin: int, size: int) -> bytes:
        """A part of a file; less than `size` bytes where the file ends."""
        return self.perform("read_range", _read_range, path, begin, size)

    def map(self, path: Path) -> memoryview:
        """A whole file, read-only, brought into memory as it is touched."""
        return self.perform("map", _map, path)

    def map_private(self, path: Path) -> memoryview:
        """The same, but it may be written to: what is written stays in this process and never reaches the file."""
        return self.perform("map_private", _map_private, path)

    def names(self, path: Path) -> list[str]:
        """What lies in a directory, sorted."""
        return self.perform("names", _names, path)

    def status(self, path: Path) -> os.stat_result:
        """Size, kind and number of links of the file itself, not of what a symbolic link points to."""
        return self.perform("status", os.lstat, path)

    def pointed_to(self, path: Path) -> str:
        """What a symbolic link says."""
        return self.perform("pointed_to", _pointed_to, path)

    def space(self, path: Path) -> Space:
        """What is free for this user on the file system that holds `path`."""
        return self.perform("space", _space, path)

    def lock(self, path: Path) -> Handle | None:
        """Lock a file or directory against others until it is closed or the process ends; None where another holds it.

        Raises:
            OSError: one of NO_LOCK where the file system has no locks.
        """
        return self.perform("lock", _lock, path)

    def lock_waiting(self, path: Path, shared: bool = False) -> Handle:
        """The same, once whoever holds it lets go.

        Args:
            shared: with others that share it, against those that do not.
        """
        return self.perform("lock_waiting", _lock_waiting, path, shared)


def _create(path: Path) -> Handle:
    return Handle(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _write(handle: Handle, data: memoryview) -> int:
    return os.write(handle.fd, data)


def _create_direct(path: Path) -> Handle:
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    return Handle(path, os.open(path, flags, 0o644))


def _write_at(handle: Handle, data: memoryview, offset: int) -> int:
    return os.pwrite(handle.fd, data, offset)


def _truncate(handle: Handle, size: int) -> None:
    os.ftruncate(handle.fd, size)


def _clone(handle: Handle, source: Path) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(handle.fd, FICLONE, fd)
    finally:
        os.close(fd)


def _sync(handle: Handle) -> None:
    os.fsync(handle.fd)


def _close(handle: Handle) -> None:
    os.close(handle.fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(source: Path, target: Path) -> None:
    os.link(source, target, follow_symlinks=False)


def _read(path: Path, limit: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        data = bytearray()
        while len(data) <= limit and (piece := file.read(min(2**20, limit + 1 - len(data)))):
            data += piece
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return bytes(data)


def _read_range(path: Path, begin: int, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        data = bytearray()
        while len(data) < size and (piece := file.read(size - len(data))):
            data += piece
    return bytes(data)


def _map(path: Path) -> memoryview:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def _map_private(path: Path) -> memoryview:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else bytearray())


def _names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def _pointed_to(path: Path) -> str:
    return os.readlink(path)


def _space(path: Path) -> Space:
    stats = os.statvfs(path)
    return Space(stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None)


def _lock_waiting(path: Path, shared: bool) -> Handle:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCK:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
    return Handle(path, fd)


def _lock(path: Path) -> Handle | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    return Handle(path, fd)
