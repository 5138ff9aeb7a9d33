"""What a disk may hold after a power cut, from the operations that were recorded.

The model is stricter than any journal: data is durable once its file was synced after the write; a name in a
directory, made or removed, once that directory was synced afterwards; both halves of a rename are on their own.
Everything else may be there or not, each thing for itself, and half of an unsynced write may be there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faults.disks import Operation

MOST_FOR_ALL_SUBSETS, RANDOM_SUBSETS = 6, 24

Content = bytes | dict[str, int] | str  # of a file, a directory (names to inodes), a symbolic link


@dataclass(frozen=True)
class Effect:
    """One thing that a cut can drop: a write into `inode` at `offset`, its end at `size`, or a `name` in directory
    `inode`.

    `target` is what the name leads to from now on, or None where it is removed.
    """

    inode: int
    offset: int = 0
    data: bytes | None = None
    size: int | None = None
    name: str = ""
    target: int | None = None


@dataclass
class Trace:
    """The recorded operations as effects on inodes, with what each sync covers.

    Attributes:
        steps: effects, and inodes that were synced, in the order in which they happened.
    """

    base: Path
    inodes: dict[int, Content] = field(default_factory=dict)
    steps: list[Effect | int] = field(default_factory=list)
    root: int = 0

    @classmethod
    def of(cls, base: Path, snapshot: dict[int, Content], operations: list[Operation]) -> Trace:
        trace = cls(base, dict(snapshot))
        live = {number: dict(c) if isinstance(c, dict) else c for number, c in snapshot.items()}
        offsets: dict[int, int] = {}
        for operation in operations:
            trace.add(operation, live, offsets)
        return trace

    def add(self, operation: Operation, live: dict[int, Content], offsets: dict[int, int]) -> None:
        args = operation.args
        match operation.name:
            case "create" | "create_direct" | "make_directory":
                self._enter(live, args[0], self._new(live, {} if operation.name == "make_directory" else b""))
            case "symlink":
                self._enter(live, args[1], self._new(live, args[0]))
            case "write":
                inode, offset = self._find(live, args[0]), offsets.get(self._find(live, args[0]), 0)
                assert operation.result == len(args[1])
                self.steps.append(Effect(inode, offset, args[1]))
                offsets[inode] = offset + len(args[1])
            case "write_at":
                assert operation.result == len(args[1])
                self.steps.append(Effect(self._find(live, args[0]), args[2], args[1]))
            case "truncate":
                self.steps.append(Effect(self._find(live, args[0]), size=args[1]))
            case "sync" | "sync_directory":
                self.steps.append(self._find(live, args[0]))
            case "link":
                self._enter(live, args[1], self._find(live, args[0]))
            case "rename":
                inode = self._find(live, args[0])
                self._enter(live, args[0], None)
                self._enter(live, args[1], inode)
            case "unlink" | "remove_directory":
                self._enter(live, args[0], None)

    def _new(self, live: dict[int, Content], content: Content) -> int:
        number = max(live) + 1
        self.inodes[number] = content
        live[number] = dict(content) if isinstance(content, dict) else content
        return number

    def _find(self, live: dict[int, Content], path: Path) -> int:
        inode = self.root
        for name in path.relative_to(self.base).parts:
            entries = live[inode]
            assert isinstance(entries, dict)
            inode = entries[name]
        return inode

    def _enter(self, live: dict[int, Content], path: Path, target: int | None) -> None:
        directory = self._find(live, path.parent)
        self.steps.append(Effect(directory, name=path.name, target=target))
        _set_name(live, directory, path.name, target)

    def disks_after_cut(self, at: int) -> Iterator[dict[int, Content]]:
        """Disks that a cut after the first `at` steps may leave. Of what was not synced there is all, nothing, all but
        one, one alone, half of one write; and every subset of few, or seeded random subsets of many."""
        done = self.steps[:at]
        pending = [number for number, step in enumerate(done) if isinstance(step, Effect) and not _synced(done, number)]
        yield self.disk(done, set())
        for number in pending:
            yield self.disk(done, {number})
            yield self.disk(done, set(pending) - {number})
            yield self.disk(done, set(), half=number)
        if len(pending) <= MOST_FOR_ALL_SUBSETS:
            subsets = itertools.chain.from_iterable(itertools.combinations(pending, n) for n in range(len(pending) + 1))
        else:
            coin = random.Random(at)
            subsets = ([number for number in pending if coin.random() < 0.5] for _ in range(RANDOM_SUBSETS))
        for subset in subsets:
            yield self.disk(done, set(subset))
        yield self.disk(done, set(pending))

    def disk(self, done: list[Effect | int], dropped: set[int], half: int = -1) -> dict[int, Content]:
        disk = {number: dict(c) if isinstance(c, dict) else c for number, c in self.inodes.items()}
        for number, step in enumerate(done):
            if not isinstance(step, Effect) or number in dropped:
                continue
            if step.size is not None:
                content = disk[step.inode]
                assert isinstance(content, bytes)
                disk[step.inode] = content[: step.size].ljust(step.size, b"\0")
                continue
            if step.data is None:
                _set_name(disk, step.inode, step.name, step.target)
                continue
            data = step.data[: len(step.data) // 2] if number == half else step.data
            old = disk[step.inode]
            assert isinstance(old, bytes)
            disk[step.inode] = old[: step.offset].ljust(step.offset, b"\0") + data + old[step.offset + len(data) :]
        return disk


def snapshot(base: Path) -> dict[int, Content]:
    """The inodes of a directory, number 0 being the directory itself; hard links are one inode."""
    numbers: dict[int, int] = {}
    inodes: dict[int, Content] = {}

    def visit(path: Path) -> int:
        status = path.lstat()
        if status.st_ino in numbers:
            return numbers[status.st_ino]
        number = numbers[status.st_ino] = len(numbers)
        if path.is_symlink():
            inodes[number] = os.readlink(path)
        elif path.is_dir():
            inodes[number] = {}
            inodes[number] = {child.name: visit(child) for child in path.iterdir()}
        else:
            inodes[number] = path.read_bytes()
        return number

    visit(base)
    return inodes


def materialise(disk: dict[int, Content], path: Path, inode: int = 0) -> None:
    """Make the directory that a disk holds."""
    content = disk[inode]
    if isinstance(content, dict):
        path.mkdir()
        for name, child in content.items():
            materialise(disk, path / name, child)
    elif isinstance(content, str):
        path.symlink_to(content)
    else:
        path.write_bytes(content)


def fingerprint(disk: dict[int, Content], inode: int = 0) -> bytes:
    """Equal for disks that look the same from outside."""
    content = disk[inode]
    if isinstance(content, dict):
        children = [name.encode() + fingerprint(disk, child) for name, child in sorted(content.items())]
        content = b"directory" + b"".join(children)
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content).digest()


def _synced(done: list[Effect | int], number: int) -> bool:
    effect = done[number]
    assert isinstance(effect, Effect)
    return effect.inode in done[number + 1 :]


def _set_name(inodes: dict[int, Content], directory: int, name: str, target: int | None) -> None:
    entries = inodes[directory]
    assert isinstance(entries, dict)
    if target is None:
        entries.pop(name, None)
    else:
        entries[name] = target
