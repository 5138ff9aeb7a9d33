"""File-system access of the checkpoint store: every system call behind one interface, and operations on whole files.

Tests use a subclass of `FileSystem` whose `perform` records operations, makes one fail, or ends the process before or
after one. Everything else is real.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar, cast

from verl.checkpoint.core.hashing import LEAF_BYTES, Leaf, LeafHasher, blocks, flat_view
from verl.errors import CheckpointReadFailed, CheckpointWriteFailed, NoSpaceForCheckpoint, VerlError
from verl.utils.progress import report

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])

FICLONE = 0x40049409  # ioctl: let this file share the blocks of another one, until either is changed
NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
NO_CLONE = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM}
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # not faults of the file
NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
NO_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class FileHandle:
    """An open file."""

    path: Path
    fd: int


@dataclass(frozen=True)
class FreeSpace:
    """Free space of a file system; `inodes` is None if their number is not limited."""

    bytes: int
    inodes: int | None


def _operation(method: M) -> M:
    """Decorator: run a method of `FileSystem` through `perform`, with the method's name."""

    @functools.wraps(method)
    def run(self: FileSystem, *args: Any, **kwargs: Any) -> Any:
        return self.perform(method.__name__, functools.partial(method, self, **kwargs), *args)

    return cast(M, run)


class FileSystem:
    """The file system. Each public method is one operation and raises the system's OSError.

    Below a directory given to `contain`, symbolic links are not followed: each component of a path is opened relative
    to its parent, so that others who can write there cannot redirect an operation. The directory itself may be a link.
    """

    _contained: tuple[Path, ...] = ()

    def contain(self, directory: Path) -> None:
        """Follow no symbolic link below a directory."""
        if not {directory, *directory.parents}.intersection(self._contained):
            self._contained = (*self._contained, directory)

    def perform(self, operation: str, call: Callable[..., T], *args: Any) -> T:
        """Run one operation, a callable. Tests override this method; all methods below run through it."""
        result = call(*args)
        report()
        return result

    @_operation
    def create(self, path: Path) -> FileHandle:
        """Open a file that must not exist yet."""
        return FileHandle(path, self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    @_operation
    def create_direct(self, path: Path) -> FileHandle:
        """Create a file for direct I/O with `write_at`; it must not exist yet.

        Raises:
            OSError: one of NO_DIRECT if the file system has no direct I/O; an empty file may have been created.
        """
        return FileHandle(path, self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644))

    @_operation
    def write(self, handle: FileHandle, data: memoryview) -> int:
        """One write call; may write fewer bytes than given."""
        return os.write(handle.fd, data)

    @_operation
    def write_at(self, handle: FileHandle, data: memoryview, offset: int) -> int:
        """One write call at an offset of the file; may write fewer bytes than given."""
        return os.pwrite(handle.fd, data, offset)

    @_operation
    def truncate(self, handle: FileHandle, size: int) -> None:
        """Truncate a file to `size` bytes."""
        os.ftruncate(handle.fd, size)

    @_operation
    def clone(self, handle: FileHandle, source: Path) -> None:
        """Fill a new file with the blocks of another one (reflink)."""
        fd = self._open_to_read(source)
        try:
            fcntl.ioctl(handle.fd, FICLONE, fd)
        finally:
            os.close(fd)

    @_operation
    def sync(self, handle: FileHandle) -> None:
        """Make the content of a file durable. After a failure the file must be given up: the kernel may have dropped
        the pages, and a second call would report success."""
        os.fsync(handle.fd)

    @_operation
    def close(self, handle: FileHandle) -> None:
        """Close a file or release a lock."""
        os.close(handle.fd)

    @_operation
    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = self._open_directory(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @_operation
    def make_directory(self, path: Path) -> None:
        """Make a directory that must not exist yet."""
        with self._at(path) as (fd, name):
            os.mkdir(name, dir_fd=fd)

    @_operation
    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file replaces a file; a directory never replaces one that holds anything."""
        with self._at(source) as (from_fd, old), self._at(target) as (to_fd, new):
            os.rename(old, new, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    @_operation
    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        with self._at(source) as (from_fd, old), self._at(target) as (to_fd, new):
            os.link(old, new, src_dir_fd=from_fd, dst_dir_fd=to_fd, follow_symlinks=False)

    @_operation
    def symlink(self, pointing_to: str, path: Path) -> None:
        """Make a symbolic link."""
        with self._at(path) as (fd, name):
            os.symlink(pointing_to, name, dir_fd=fd)

    @_operation
    def unlink(self, path: Path) -> None:
        """Remove the name of a file."""
        with self._at(path) as (fd, name):
            os.unlink(name, dir_fd=fd)

    @_operation
    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        with self._at(path) as (fd, name):
            os.rmdir(name, dir_fd=fd)

    @_operation
    def read(self, path: Path, limit: int) -> bytes:
        """A whole file of at most `limit` bytes.

        Raises:
            OSError: EFBIG if it is larger, EINVAL if it is not a regular file; likewise for the other reads.
        """
        with open(self._open_to_read(path), "rb", buffering=0) as file:
            data = _read_up_to(file, limit + 1)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        return data

    @_operation
    def read_range(self, path: Path, begin: int, size: int) -> bytes:
        """A range of a file; fewer than `size` bytes at the end of the file."""
        with open(self._open_to_read(path), "rb", buffering=0) as file:
            file.seek(begin)
            return _read_up_to(file, size)

    @_operation
    def map(self, path: Path, writable: bool = False) -> memoryview:
        """Map a whole file; where it is writable, changes stay in this process and are not written to the file."""
        with open(self._open_to_read(path), "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size:
                access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
                return memoryview(mmap.mmap(file.fileno(), 0, access=access))
            return memoryview(bytearray() if writable else b"")

    @_operation
    def names(self, path: Path) -> list[str]:
        """Sorted names in a directory."""
        fd = self._open_directory(path)
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    @_operation
    def status(self, path: Path) -> os.stat_result:
        """Size, kind and number of links of a file; symbolic links are not followed."""
        with self._at(path) as (fd, name):
            return os.stat(name, dir_fd=fd, follow_symlinks=False)

    @_operation
    def space(self, path: Path) -> FreeSpace:
        """Free space for this user on the file system of `path`."""
        stats = os.statvfs(path)
        return FreeSpace(stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None)

    @_operation
    def lock(self, path: Path, shared: bool = False) -> FileHandle | None:
        """Lock a file or directory, exclusively or shared, until it is closed or the process ends; None if another
        process holds the lock or has replaced the file in the meantime.

        Raises:
            OSError: one of NO_LOCK if the file system has no locks.
        """
        try:
            fd = self._open(path, os.O_RDWR | os.O_NONBLOCK)  # an exclusive lock on NFS needs write access
        except OSError:  # a directory, or a file of another user
            fd = self._open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            with self._at(path) as (parent, name):
                if not os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=parent)):
                    raise BlockingIOError
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        return FileHandle(path, fd)

    # -- paths relative to a contained directory ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _at(self, path: Path) -> Iterator[tuple[int | None, str]]:
        """The open parent of a path below a contained directory and its name there; None and the path for others."""
        above = [directory for directory in self._contained if directory in path.parents]
        if not above:
            yield None, str(path)
            return
        root = min(above, key=lambda directory: len(directory.parts))
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in path.relative_to(root).parts[:-1]:
                below = _open_below(fd, part, path)
                os.close(fd)
                fd = below
            yield fd, path.name
        except OSError as error:
            error.filename = str(path) if error.filename in (path.name, *path.parts) else error.filename
            raise
        finally:
            os.close(fd)

    def _open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        with self._at(path) as (fd, name):
            follow = 0 if fd is None else os.O_NOFOLLOW
            return os.open(name, flags | follow | os.O_CLOEXEC, mode, dir_fd=fd)

    def _open_to_read(self, path: Path) -> int:
        return self._open(path, os.O_RDONLY | os.O_NONBLOCK)  # the latter: a FIFO is empty, and not waited for

    def _open_directory(self, path: Path) -> int:
        with self._at(path) as (fd, name):
            if fd is None:
                return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return _open_below(fd, name, path, os.O_RDONLY)


def _read_up_to(file: FileIO, size: int) -> bytes:
    """The next `size` bytes of a file, fewer at its end; a single read call may return less."""
    data = bytearray()
    while len(data) < size and (piece := file.read(min(LEAF_BYTES, size - len(data)))):
        data += piece
    return bytes(data)


def _open_below(fd: int, name: str, path: Path, access: int = os.O_PATH) -> int:
    """Open a directory in the directory `fd`.

    Raises:
        OSError: ELOOP for a symbolic link.
    """
    try:
        return os.open(name, access | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except NotADirectoryError as error:
        if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            kind = f"{name} is a symbolic link, which is not followed in a directory of checkpoints"
            raise OSError(errno.ELOOP, kind, str(path)) from error
        raise


def write_file(disk: FileSystem, path: Path, buffers: Iterable[Any]) -> tuple[Leaf, ...]:
    """Write a new file from buffers and make its content durable (its name is durable once its directory is synced).

    Hashes the buffers in memory, not what a later read returns, so that damage on the way to the disk is detected.

    Raises:
        OSError: the file must be abandoned; a second attempt must use another name.
    """
    hasher = LeafHasher()

    def fill(handle: FileHandle) -> None:
        for buffer in buffers:
            for block in blocks(flat_view(buffer)):
                hasher.update(block)
                _write_all(disk, handle, block)
            hasher.cut()

    _create_filled(disk, path, fill)
    return tuple(hasher.leaves)


TEMPORARY_SUFFIX = ".tmp"  # of a file that is renamed once it is complete


def write_by_rename(disk: FileSystem, path: Path, data: bytes) -> None:
    """Write a small file under a temporary name and rename it, so that it is never partial. Syncs the file, not the
    directory."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        write_file(disk, temporary, [data])
    except FileExistsError:  # left by a killed process, or being written by another one
        temporary = path.with_name(f"{path.name}-{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")
        write_file(disk, temporary, [data])
    disk.rename(temporary, path)


def duplicate(disk: FileSystem, source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`, or a clone where the file system cannot link.

    Returns: False if the file system supports neither; `target` then does not exist, and the caller must copy the
        bytes.
    """
    try:
        disk.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return clone(disk, source, target)
    return True


def clone(disk: FileSystem, source: Path, target: Path) -> bool:
    """Make `target` a copy-on-write clone of `source`. Returns False if the file system does not support it."""
    try:
        _create_filled(disk, target, lambda handle: disk.clone(handle, source))
    except OSError as error:
        if error.errno not in {*NO_CLONE, errno.ENOENT}:
            raise
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(target)
        if error.errno == errno.ENOENT:  # the source was removed in the meantime
            raise
        return False
    return True


@contextlib.contextmanager
def write_errors(doing: str, beside: str = "Earlier checkpoints are untouched") -> Iterator[None]:
    """Context that converts OSError to a checkpoint error with a description of the operation.

    Args:
        beside: state of everything else, for the message.
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
        raise kind(f"{_failure(doing, error)}. {beside}") from error


@contextlib.contextmanager
def read_errors(doing: str) -> Iterator[None]:
    """Translate errors as `write_errors` does, for read operations.

    Raises:
        CheckpointReadFailed: the file system refused.
    """
    try:
        yield
    except VerlError:  # of a checkpoint, or of a store
        raise
    except OSError as error:
        raise CheckpointReadFailed(_failure(doing, error)) from error


def _failure(doing: str, error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{doing} failed: {error.strerror or error}{where}"


def make_directories(disk: FileSystem, path: Path, below: Path) -> None:
    """Create `path` and missing parents up to `below`, which exists. Safe with concurrent creation."""
    missing = [path, *path.parents]
    for directory in reversed(missing[: missing.index(below)]):
        with contextlib.suppress(FileExistsError):
            disk.make_directory(directory)


def is_directory(disk: FileSystem, path: Path) -> bool:
    """Whether this is a directory and not a symbolic link to one."""
    try:
        return stat.S_ISDIR(disk.status(path).st_mode)
    except FileNotFoundError:
        return False


def files_below(disk: FileSystem, root: Path) -> tuple[dict[str, int], list[Path]]:
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
                # A symbolic link or a device has no content: use a size that matches no file.
                sizes[path.relative_to(root).as_posix()] = status.st_size if stat.S_ISREG(status.st_mode) else -1
        directories.append(directory)

    visit(root)
    return sizes, directories


def remove_tree(disk: FileSystem, root: Path) -> None:
    """Remove a file or a directory tree; missing entries are ignored."""
    with contextlib.suppress(FileNotFoundError):
        if is_directory(disk, root):
            remove_content(disk, root)
            disk.remove_directory(root)
        else:
            disk.unlink(root)


def remove_content(disk: FileSystem, directory: Path) -> None:
    """Remove the content of a directory, which may be missing. Safe with concurrent removal."""
    with contextlib.suppress(FileNotFoundError):
        for name in disk.names(directory):
            remove_tree(disk, directory / name)


def _create_filled(disk: FileSystem, path: Path, fill: Callable[[FileHandle], None]) -> None:
    handle = disk.create(path)
    try:
        fill(handle)
        disk.sync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.close(handle)
        raise
    disk.close(handle)  # some file systems report a failed write only here


def _write_all(disk: FileSystem, handle: FileHandle, block: memoryview) -> None:
    while block:
        written = disk.write(handle, block)
        if written <= 0:
            raise OSError(errno.EIO, "a write took no bytes", str(handle.path))
        block = block[written:]
