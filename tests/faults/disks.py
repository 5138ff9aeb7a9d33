"""Disks that do the real thing, and also note it, fail once, or end the process."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.core.filesystem import FileHandle, FileSystem

KILLED = 137
CHANGING = {
    "create", "create_direct", "write", "write_at", "truncate", "clone",
    "sync", "close", "sync_directory", "make_directory", "rename", "link", "symlink",
    "unlink", "remove_directory",
}  # fmt: skip


def is_killed(act: Callable[[], object]) -> bool:
    """Do it in a child process; whether that was killed, and not done before."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), "the child failed by itself"
    return code == KILLED


@dataclass(frozen=True)
class Operation:
    """One operation as it was performed; handles are replaced by their paths, views by their bytes."""

    name: str
    args: tuple[Any, ...]
    result: Any = None

    @property
    def path(self) -> Path:
        return self.args[0]


class RecordingDisk(FileSystem):
    """Notes every operation that succeeds.

    Args:
        skips: operations that are left out, as if the line of code were not there.
    """

    def __init__(self, skips: Callable[[Operation], bool] = lambda operation: False):
        self.operations: list[Operation] = []
        self.num_changing = 0  # tried, whether they succeeded or not
        self._skips = skips

    def perform(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        noted = Operation(operation, tuple(_plain(arg) for arg in args))
        if self._skips(noted):
            return None
        self.num_changing += operation in CHANGING
        result = call(*args)
        kept = result if isinstance(result, int) else None
        self.operations.append(Operation(noted.name, noted.args, kept))
        return result


class KillingDisk(FileSystem):
    """Ends the process, as SIGKILL does, at the n-th operation that changes something.

    Args:
        moment: `before` it, `after` it, or `within` a write, half of which is done.
    """

    def __init__(self, at: int, moment: str):
        self._left, self._moment = at, moment

    def perform(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        if operation not in CHANGING:
            return call(*args)
        self._left -= 1
        if self._left != -1:
            return call(*args)
        if self._moment == "within" and operation in ("write", "write_at"):
            call(args[0], args[1][: len(args[1]) // 2], *args[2:])
        try:
            if self._moment == "after":
                call(*args)
        finally:
            os._exit(KILLED)


class FailingDisk(FileSystem):
    """Lets the n-th operation fail, once."""

    def __init__(self, at: int, code: int):
        self._left, self._code = at, code
        self.failed: Operation | None = None

    def perform(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            self.failed = Operation(operation, tuple(_plain(arg) for arg in args))
            if operation == "close":
                call(*args)  # the system closes a file even where it reports an error
            raise OSError(self._code, os.strerror(self._code), str(self.failed.path))
        return call(*args)


class RefusingDisk(FileSystem):
    """Refuses every operation of some names with the code given, as a file system without them does."""

    def __init__(self, **codes: int):
        self._codes = codes

    def perform(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        if (code := self._codes.get(operation)) is not None:
            raise OSError(code, os.strerror(code), str(_plain(args[0])))
        return call(*args)


class ShortWritingDisk(FileSystem):
    """Writes at most seven bytes at a time."""

    def write(self, handle: FileHandle, data: memoryview) -> int:
        return super().write(handle, data[:7])


def _plain(arg: Any) -> Any:
    if isinstance(arg, FileHandle):
        return arg.path
    return bytes(arg) if isinstance(arg, memoryview) else arg
