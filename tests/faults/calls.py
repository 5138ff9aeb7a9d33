"""The file calls of a whole process, whatever library makes them: counted, recorded, and one of them struck.

What is recorded becomes the `Operation`s of `faults.disks`, so that a recording of any program goes through the same
model of a power cut as our own.
"""

import ctypes
import errno
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from faults.disks import Operation

SOURCES = Path(__file__).parent / "interposer"
LIBRARY = "TEST_INTERPOSER"  # environment variable: where the library is
NAMES = [
    "", "open", "create", "truncate", "write_at", "sync", "rename", "link", "symlink", "unlink", "make_directory",
    "remove_directory", "close", "unseen", "failed",
]  # fmt: skip
KINDS = ["none", "kill before", "kill within", "kill after", "fail", "fail from", "short"]
HEAD = struct.Struct("<5q")


@dataclass(frozen=True)
class Strike:
    """What is done at one call.

    Args:
        at: number of the call, from 0; -1 strikes none.
        kind: one of KINDS; `fail from` refuses whatever takes space from there on, as a full disk does.
        code: of the error.
    """

    at: int = -1
    kind: str = "none"
    code: int = 0

    def __str__(self) -> str:
        named = f" {errno.errorcode[self.code]}" if self.code else ""
        return f"{self.kind}{named} call {self.at}"


def why_not() -> str | None:
    """Why this machine cannot interpose, or None where it can."""
    if (os.uname().sysname, os.uname().machine) != ("Linux", "x86_64"):
        return "system calls are interposed on x86-64 Linux only"
    return None if shutil.which("cc") else "needs a C compiler, cc"


def build(directory: Path) -> Path:
    """Compile the library."""
    target = directory / "interposer.so"
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared"]
    subprocess.run(["cc", *options, "-o", str(target), *map(str, sorted(SOURCES.glob("*.c"))), "-lpthread"], check=True)
    return target


def refusal(library: Path) -> str | None:
    """Why the kernel does not let a process interpose itself, as some sandboxes do not, or None where it does."""
    code = "from faults.calls import *; Interposer().arm(Path('/nowhere'), Strike()); open(os.devnull, 'w').close()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(library), capture_output=True, text=True)
    return done.stderr[-300:] or f"ended with {done.returncode}" if done.returncode else None


def environment(library: Path) -> dict[str, str]:
    """For a Python that finds the library, this package, its campaign and verl, whatever directory it is started in."""
    root = SOURCES.parents[2]
    paths = os.pathsep.join(map(str, (root, root / "tests", root / "benchmarks/fault_campaign")))
    return os.environ | {LIBRARY: str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


class Interposer:
    """The library inside a process that has nothing else to do: what it sets up stays until the process ends."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.faults_arm.argtypes = [
            ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        self._library.faults_arm.restype = self._library.faults_disarm.restype = ctypes.c_long

    def arm(self, root: Path, strike: Strike, log_fd: int = -1, fired: ctypes.c_long | None = None) -> None:
        """Watch everything below `root`, an absolute path without links."""
        address = ctypes.addressof(fired) if fired is not None else None
        kind = KINDS.index(strike.kind)
        result = self._library.faults_arm(os.fsencode(root), strike.at, kind, strike.code, log_fd, address)
        if result:
            raise OSError(-result, "the kernel refuses a seccomp filter")

    def disarm(self) -> int:
        """Watch no longer; returns the number of calls counted."""
        return self._library.faults_disarm()


def recorded(log: Path) -> list[Operation]:
    """The calls that were counted, in order; one that failed by itself is named `failed`.

    Raises:
        ValueError: one of them changed content in a way that a log does not describe.
    """
    data = memoryview(log.read_bytes())
    operations, at = [], 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return bytes(data[at - size : at])

    while at < len(data):
        number, path_length, other_length, offset, size = HEAD.unpack(take(HEAD.size))
        path, other, content = Path(os.fsdecode(take(path_length))), os.fsdecode(take(other_length)), take(size)
        operations.append(_operation(NAMES[number], path, other, offset, content))
    return operations


def _operation(name: str, path: Path, other: str, offset: int, content: bytes) -> Operation:
    match name:
        case "write_at":
            return Operation(name, (path, content, offset), len(content))
        case "truncate":
            return Operation(name, (path, offset))
        case "rename" | "link":
            return Operation(name, (path, Path(other)))
        case "symlink":
            return Operation(name, (other, path))
        case "unseen":
            raise ValueError(f"{path} was changed in a way that the interposer does not describe")
    return Operation(name, (path,))
