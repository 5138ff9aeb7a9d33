"""RankWriter: one writer of a save (a thread, this process or another rank), and deduplication of unchanged files.

`DedupIndex` finds files by their digest and shares them by hard links. It is an index, not a store: every object is a
hard link to a file of some checkpoint. It may be deleted at any time, at the cost of one more copy of each file.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.direct_io import FileImage, ImageSource, write_direct
from verl.checkpoint.core.filesystem import (
    NO_LINK,
    FileSystem,
    clone,
    duplicate,
    holds_leaves,
    make_directories,
    write_errors,
    write_file,
)
from verl.checkpoint.core.hashing import LEAF_BYTES, Leaf, hash_buffers
from verl.checkpoint.core.manifest import STATE, FileEntry, LogicalTensor, checked_path
from verl.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointWriteFailed, FileFault

SMALL_BYTES = 64 * 2**20


class DedupIndex:
    """The directory `objects/`."""

    def __init__(self, disk: FileSystem, root: Path):
        self._disk, self._root, self._directory = disk, root, root / "objects"

    def fetch(self, entry: FileEntry, target: Path) -> bool:
        """Make `target` share the bytes of the object that `entry` describes; returns False if there is none.

        A small object is read and hashed first, so that damage does not spread to later checkpoints.
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
        """Add a published file to the index; no effect if the file system has no hard links."""
        make_directories(self._disk, self._directory, self._root)
        try:
            self._disk.link(path, self._path(entry))
        except OSError as error:
            if error.errno not in NO_LINK | {errno.EEXIST}:
                raise

    def sweep(self) -> int:
        """Remove objects that no checkpoint uses. Returns the bytes freed."""
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
        return entry.size > SMALL_BYTES or holds_leaves(self._disk, source, entry.leaves)

    def _path(self, entry: FileEntry) -> Path:
        return self._directory / f"{entry.blake3}-{entry.size}"


@dataclass(frozen=True)
class RankReport:
    """Report of a writer, as plain values that can be sent to the committing process."""

    name: str
    files: tuple[FileEntry, ...]
    tensors: tuple[LogicalTensor, ...]
    shared: tuple[str, ...]  # paths worth finding again by digest


class RankWriter:
    """Writes files into a staging directory. Its methods may be called from several threads.

        part = RankWriter(staging_directory, "rank_1")
        part.write("rng/rank_1.json", [b"{}"])
        connection.send(part.report())

    Args:
        directory: `SaveTransaction.directory`.
        name: unique among the participants of a save.
    """

    def __init__(self, directory: Path, name: str, disk: FileSystem | None = None):
        self.directory, self.name = directory, name
        self._disk = disk or FileSystem()
        self.objects = DedupIndex(self._disk, directory.parents[1])
        self._files: list[FileEntry] = []
        self._tensors: list[LogicalTensor] = []
        self._shared: list[str] = []
        self._failed: list[str] = []

    def write(self, path: str, buffers: Iterable[Any], deduplicate: bool = False) -> FileEntry:
        """Write a file and make it durable.

        Args:
            path: within the checkpoint; a file is written once.
            buffers: its content in order, such as `[b"..."]` or arrays; they must not change during the call.
            deduplicate: the file is likely unchanged since an earlier save; share that one's bytes if it is.
        """
        with self._writing(path) as target:
            if deduplicate:
                buffers = list(buffers)
                entry = FileEntry.of(path, hash_buffers(buffers))
                self._shared.append(path)
                if self.objects.fetch(entry, target):
                    return self.keep_file(entry)
            return self.keep_file(FileEntry.of(path, write_file(self._disk, target, buffers)))

    def write_image(self, image: FileImage, source: ImageSource, leaves: Callable[[], tuple[Leaf, ...]]) -> FileEntry:
        """Write a file from a contiguous buffer, by direct I/O if the file system supports it.

        Args:
            leaves: returns the leaves of its digest, which another thread may compute while this one writes.
        """
        with self._writing(image.path) as target:
            if not write_direct(self._disk, target, image, source):
                write_file(self._disk, target, image.buffers(source))
            return self.keep_file(FileEntry.of(image.path, leaves()))

    def add_existing_file(self, path: str, source: Path, entry: FileEntry | None = None) -> FileEntry:
        """Add a file that exists already.

        Args:
            path: within the checkpoint.
            source: the file.
            entry: its entry, recorded when it was written, if it is never modified: the file is hard-linked without
                reading it, or copied and verified if the file system has no links. None: its owner may modify it; it is
                cloned or copied, and hashed.
        """
        with self._writing(path) as target:
            if entry is not None:
                if not duplicate(self._disk, source, target):
                    self._copy(source, target, entry)
                return self.keep_file(replace(entry, path=path))
            self._shared.append(path)
            if clone(self._disk, source, target):
                return self.keep_file(FileEntry.of(path, hash_buffers(_pieces(self._disk, target))))
            return self.keep_file(FileEntry.of(path, write_file(self._disk, target, _pieces(self._disk, source))))

    def link(self, path: str, checkpoint: Checkpoint, records_tensors: bool = True) -> FileEntry:
        """Share a file of an earlier checkpoint, with its recorded digest and without reading it.

        Args:
            records_tensors: record its tensors as well; False if they are already recorded.
        Raises:
            CheckpointNotFound: the earlier checkpoint has no such file.
        """
        recorded = checkpoint.manifest.file(path)
        if recorded is None:
            raise CheckpointNotFound(f"{checkpoint.directory} has no file {path} to share")
        if records_tensors:
            slices = checkpoint.slices_by_file.get(path, ())
            self.record(*(replace(tensor, slices=(part,)) for tensor, part in slices))
        return self.add_existing_file(path, checkpoint.path(path), replace(recorded, linked_from=checkpoint.name))

    def record(self, *tensors: LogicalTensor) -> None:
        """Record which logical tensors, or slices of them, are in the files of this writer."""
        self._tensors.extend(tensors)

    def report(self) -> RankReport:
        """Report of all written files, for `SaveTransaction.commit`.

        Raises:
            CheckpointWriteFailed: any write of this writer failed.
        """
        if self._failed:
            raise CheckpointWriteFailed(f"{self.name} could not write {', '.join(self._failed)}; see the error above")
        return RankReport(self.name, tuple(self._files), tuple(self._tensors), tuple(self._shared))

    @contextmanager
    def _writing(self, path: str) -> Iterator[Path]:
        if path == STATE:
            raise ValueError(f"{STATE} is written by the commit, from `state`")
        target = self.directory / checked_path(path)
        try:
            with write_errors(f"writing {path}"):
                make_directories(self._disk, target.parent, self.directory)
                yield target
        except BaseException:
            self._failed.append(path)
            raise

    def keep_file(self, entry: FileEntry) -> FileEntry:
        """List a file that is complete on the disk; returns its entry."""
        self._files.append(entry)
        return entry

    def _copy(self, source: Path, target: Path, entry: FileEntry) -> None:
        pieces = _pieces(self._disk, source, [leaf.size for leaf in entry.leaves])
        copied = FileEntry.of(entry.path, write_file(self._disk, target, pieces))
        if (copied.size, copied.blake3) != (entry.size, entry.blake3):
            raise CheckpointCorrupt(source.parent, [FileFault(source.name, "its bytes are not those recorded for it")])


def _pieces(disk: FileSystem, source: Path, sizes: Iterable[int] | None = None) -> Iterator[bytes]:
    """A file in pieces: of the sizes of its leaves, where these are known, so that they come out the same."""
    begin = 0
    for size in sizes if sizes is not None else iter(lambda: LEAF_BYTES, None):
        piece = disk.read_range(source, begin, size)
        if not piece:
            return
        yield piece
        begin += len(piece)
