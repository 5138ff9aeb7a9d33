"""Control groups for jails: limits of memory and processes that hold for all processes of a jail together.

The first process of a jail is put into a separate cgroup before it runs a program; its child processes inherit it.
Under cgroup v1 groups are made below the group of this process. Under v2 they are made below or next to it, since only
a group without processes may have limited child groups.

    v1   /sys/fs/cgroup/{memory,pids}/<own group>/verl-jail-<pid>-<start>-<number>
    v2   /sys/fs/cgroup/<own group, or the one above it>/verl-jail-<pid>-<start>-<number>

If this process may not create groups (most containers), none are used, and `find` reports why.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl.utils.orphan_cleanup import process_fields

CONTROLLERS: tuple[str, ...] = ("memory", "pids")
PREFIX = "verl-jail-"
REMOVE_S = 2.0  # for a group whose last process has just ended
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-\d+")


class CgroupError(Exception):
    """A group could not be made or limited."""


@dataclass(frozen=True)
class JailGroup:
    """The group of one jail.

    Attributes:
        paths: of its directory, by controller; one directory under v2.
        version: 1 or 2.
    """

    paths: Mapping[str, Path]
    version: int

    def limit_memory(self, limit: int) -> None:
        """Bytes that its processes may use together, swap included.

        Raises:
            CgroupError: it could not be set.
        """
        group = self.paths["memory"]
        if self.version == 2:
            _write(group / "memory.max", limit)
            if (group / "memory.swap.max").exists():
                _write(group / "memory.swap.max", 0)
            _write(group / "memory.oom.group", 1)
            return
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists() and int(swap.read_text()) < limit:  # the two limits never cross
            _write(swap, limit)
        _write(group / "memory.limit_in_bytes", limit)
        if swap.exists():
            _write(swap, limit)

    def add(self, pid: int) -> None:
        """Put a process into it, with all that it will start.

        Raises:
            CgroupError: the process has ended, or may not be moved.
        """
        for path in set(self.paths.values()):
            _write(path / "cgroup.procs", pid)

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has ended a process of it for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError), open(self.paths["memory"] / name, "rb") as file:
            return any(line.startswith(b"oom_kill ") and int(line.split()[1]) > 0 for line in file)
        return False

    def remove(self) -> bool:
        """Remove it; False where a process of it has not ended yet."""
        for path in set(self.paths.values()):
            with contextlib.suppress(OSError):
                path.rmdir()
        return not any(path.exists() for path in self.paths.values())


class JailGroups:
    """Makes groups for the jails of one pool.

    Args:
        bases: directories in which they are made, by controller.
        version: of cgroups, 1 or 2.
    """

    numbers = itertools.count()

    def __init__(self, bases: Mapping[str, Path], version: int):
        self.bases, self.version = bases, version
        self._left: deque[JailGroup] = deque()

    @classmethod
    def find(cls) -> JailGroups | str:
        """Groups for this process, or in words why it may make none. Removes those of processes that were killed."""
        reason = "this kernel has no cgroups with controllers for memory and processes"
        for version, bases in candidate_directories():
            groups = cls(bases, version)
            if (fault := groups._fault()) is None:
                groups.remove_stale()
                return groups
            reason = fault
        return reason

    def _fault(self) -> str | None:
        """Why a process cannot be put into a group; found by trying."""
        try:
            group = self.make(64 << 20, 8)
        except CgroupError as error:
            return str(error)
        try:
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
                group.add(process.pid)
        except (CgroupError, OSError) as error:
            return f"no process can be put into a cgroup ({error})"
        finally:
            self.remove(group)
            self.close()
        return None

    def make(self, memory: int, processes: int) -> JailGroup:
        """A group without processes.

        Args:
            memory: bytes.
        Raises:
            CgroupError: it could not be made.
        """
        self._remove_left()
        name = f"{PREFIX}{os.getpid()}-{_start_of(os.getpid())}-{next(self.numbers)}"
        group = JailGroup({controller: base / name for controller, base in self.bases.items()}, self.version)
        try:
            for path in set(group.paths.values()):
                path.mkdir()
            group.limit_memory(memory)
            _write(group.paths["pids"] / "pids.max", processes)
        except (OSError, CgroupError) as error:
            self.remove(group)
            raise CgroupError(f"no cgroup can be made or limited ({error})") from error
        return group

    def remove(self, group: JailGroup) -> None:
        """Remove a group whose processes have ended, or are about to: with the next one that is made, or at the end."""
        self._left.append(group)

    def close(self) -> None:
        """Remove what is left."""
        deadline = time.monotonic() + REMOVE_S
        self._remove_left()
        while self._left and time.monotonic() < deadline:
            time.sleep(0.01)
            self._remove_left()

    def _remove_left(self) -> None:
        for _ in range(len(self._left)):
            with contextlib.suppress(IndexError):  # another thread was faster
                group = self._left.popleft()
                if not group.remove():
                    self._left.append(group)

    def remove_stale(self) -> None:
        """Remove groups of processes that ended without removing them."""
        for base in set(self.bases.values()):
            for path in base.glob(f"{PREFIX}*"):
                match = _NAME.fullmatch(path.name)
                if match and _start_of(int(match[1])) != int(match[2]):
                    with contextlib.suppress(OSError):
                        path.rmdir()


def _write(path: Path, value: int) -> None:
    try:
        with open(path, "w") as file:
            file.write(str(value))
    except OSError as error:
        raise CgroupError(f"{path}: {error.strerror}") from error


def _start_of(pid: int) -> int:
    """Start time of a process, in clock ticks; 0 if it does not exist."""
    fields = process_fields(pid)
    return int(fields[19]) if fields else 0


def candidate_directories() -> list[tuple[int, Mapping[str, Path]]]:
    """Directories in which groups could be created, the better first."""
    groups, mounts = _own_groups(), _mounts()
    roots: list[tuple[int, Mapping[str, Path]]] = []
    if "" in groups and "" in mounts:
        root, mount = mounts[""]
        group = _below(mount, root, groups[""])
        roots += [
            (2, dict.fromkeys(CONTROLLERS, base))
            for base in dict.fromkeys((group, group.parent))
            if base.is_relative_to(mount)
            and set(CONTROLLERS) <= set(" ".join(_lines(base / "cgroup.subtree_control")).split())
        ]
    if all(name in groups and name in mounts for name in CONTROLLERS):
        roots.append((1, {name: _below(mounts[name][1], mounts[name][0], groups[name]) for name in CONTROLLERS}))
    return roots


def _below(mount: Path, root: str, group: str) -> Path:
    """The directory of a group, of a file system of which the mount shows what is below `root`."""
    inside = os.path.relpath(group, root)
    return mount if inside.startswith("..") else mount / inside


def _own_groups() -> dict[str, str]:
    """The groups of this process, by controller; of v2 under the empty name."""
    groups = {}
    for line in _lines(Path("/proc/self/cgroup")):
        _, _, remaining = line.partition(":")
        names, _, path = remaining.partition(":")
        groups |= dict.fromkeys(names.split(","), path)
    return groups


def _mounts() -> dict[str, tuple[str, Path]]:
    """Root and directory of each mounted hierarchy, by controller; of v2 under the empty name."""
    mounts = {}
    for line in _lines(Path("/proc/self/mountinfo")):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 6 or len(kinds) < 3:
            continue
        mount = fields[3], Path(fields[4])
        if kinds[0] == "cgroup2":
            mounts[""] = mount
        elif kinds[0] == "cgroup":
            mounts |= {name: mount for name in kinds[2].split(",") if name in CONTROLLERS}
    return mounts


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
