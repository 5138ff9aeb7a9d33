"""Deduplication: files that stay the same from save to save, found again by their digest and shared by hard links.

An index, not a store: every object is a second name of a file that some checkpoint holds. It may be deleted at any
time, and then costs one more copy of each file.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from verl.checkpoint.disk import NO_LINK, Disk
from verl.checkpoint.files import duplicate, make_directories
from verl.checkpoint.hashing import digest_of
from verl.checkpoint.manifest import FileEntry

SMALL_BYTES = 64 * 2**20


class Objects:
    """The directory `objects/`."""

    def __init__(self, disk: Disk, root: Path):
        self._disk, self._root, self._directory = disk, root, root / "objects"

    def fetch(self, entry: FileEntry, target: Path) -> bool:
        """Make `target` share the bytes of the object that `entry` describes. False where there is none.

        A small object is read and hashed first, so that damage does not spread to the checkpoints to come.
        """
        source = self._path(entry)
        try:
            if not self._is_intact(source, entry):
                self._disk.unlink(source)
                return False
            return duplicate(self._disk, source, target)
        except FileNotFoundError:
            return False

    def add(self, path: Path, entry: FileEntry) -> None:
        """Index a published file. Where the file system has no links there is nothing to gain, and nothing happens."""
        make_directories(self._disk, self._directory, self._root)
        try:
            self._disk.link(path, self._path(entry))
        except OSError as error:
            if error.errno not in NO_LINK | {errno.EEXIST}:
                raise

    def sweep(self) -> int:
        """Forget what no checkpoint holds any more. Returns the bytes freed."""
        freed = 0
        with contextlib.suppress(FileNotFoundError):
            for name in self._disk.names(self._directory):
                status = self._disk.status(self._directory / name)
                if status.st_nlink == 1:
                    self._disk.unlink(self._directory / name)
                    freed += status.st_size
        return freed

    def _is_intact(self, source: Path, entry: FileEntry) -> bool:
        if self._disk.status(source).st_size != entry.size:
            return False
        if entry.size > SMALL_BYTES:
            return True
        begin = 0
        for leaf in entry.leaves:
            if digest_of(self._disk.read_range(source, begin, leaf.size)) != leaf.blake3:
                return False
            begin += leaf.size
        return True

    def _path(self, entry: FileEntry) -> Path:
        return self._directory / f"{entry.blake3}-{entry.size}"
