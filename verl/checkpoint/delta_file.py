"""A file of a checkpoint that is stored as its difference from a base, as a reader sees it: bytes from a place on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from verl.checkpoint.delta import DeltaError, Index, Segment, decode
from verl.checkpoint.hashing import digest_of
from verl.checkpoint.manifest import DeltaEntry, FileEntry
from verl.checkpoint.published import Published
from verl.errors import CheckpointCorrupt, FileFault

Read = Callable[[str, int, int], memoryview]


class DeltaFile:
    """Decodes what is asked for, segment by segment; nothing is kept.

    Args:
        read: gives the bytes of a stored file, by path, between two places.
    """

    def __init__(self, published: Published, entry: DeltaEntry, read: Read):
        self.entry = entry
        self._published, self._read = published, read
        self._stored, self._base = (_listed(published, path) for path in (entry.delta, entry.base))

    @cached_property
    def index(self) -> Index:
        """Where the segments lie, checked against the sizes of all three files.

        Raises:
            CheckpointCorrupt: it cannot be read, or does not fit.
        """
        try:
            index = Index.read(lambda begin, size: self._read(self.entry.delta, begin, begin + size), self._stored.size)
        except DeltaError as error:
            raise self._corrupt(self.entry.delta, str(error)) from error
        if index.size != self.entry.file.size:
            problem = f"it gives {index.size} bytes of {self.entry.path}, which has {self.entry.file.size}"
            raise self._corrupt(self.entry.delta, problem)
        if index.base_bytes > self._base.size:
            raise self._corrupt(self.entry.base, f"it is shorter than {self.entry.delta} says")
        return index

    def decoded(self, begin: int, end: int) -> memoryview:
        """Bytes of the file, writable, in memory of their own.

        Raises:
            CheckpointCorrupt: they cannot be decoded.
        """
        result = memoryview(bytearray(end - begin))
        for start, at, segment in self.index.within(begin, end):
            low, high = max(begin, start), min(end, start + segment.size)
            try:
                data = decode(segment, self._read(self.entry.delta, at, at + segment.stored), self._read_base)
            except DeltaError as error:
                problem = f"bytes {at} to {at + segment.stored}: {error}"
                raise self._corrupt(self.entry.delta, problem, low, high) from error
            result[low - begin : high - begin] = memoryview(data)[low - start : high - start]
        return result

    def blamed(self, low: int, high: int) -> CheckpointCorrupt:
        """Which of the stored files is why bytes of this one are not what was written."""
        faults = [*self._faults_of(self._base), *self._faults_of(self._stored)]
        problem = f"bytes {low} to {high}, decoded, are not those that were written"
        own = FileFault(self.entry.path, problem, self._published.tensors_in(self.entry.path, low, high))
        return CheckpointCorrupt(self._published.directory, faults or [own])

    def tensors_made_of(self, stored: str, begin: int, end: int) -> tuple[str, ...]:
        """Full names of the tensors that bytes of the delta, or of the base, take part in."""
        try:
            touched = list(_touched(self.index, stored == self.entry.base, begin, end))
        except CheckpointCorrupt:
            touched = [(0, self.entry.file.size)]
        names = [name for low, high in touched for name in self._published.tensors_in(self.entry.path, low, high)]
        return tuple(dict.fromkeys(names))

    def _faults_of(self, stored: FileEntry) -> Iterator[FileFault]:
        begin = 0
        for leaf in stored.leaves:
            end = begin + leaf.size
            if digest_of(self._read(stored.path, begin, end)) != leaf.blake3:
                problem = f"bytes {begin} to {end} are not those that were written"
                yield FileFault(stored.path, problem, self.tensors_made_of(stored.path, begin, end))
            begin = end

    def _read_base(self, begin: int, end: int) -> memoryview:
        return self._read(self.entry.base, begin, end)

    def _corrupt(self, path: str, problem: str, low: int = 0, high: float = float("inf")) -> CheckpointCorrupt:
        tensors = self._published.tensors_in(self.entry.path, low, high)
        return CheckpointCorrupt(self._published.directory, [FileFault(path, problem, tensors)])


def _touched(index: Index, is_base: bool, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Places of the file that are made of a stretch of the delta, or of the base."""
    for start, at, segment in index.within(0, index.size):
        low, size = _used(segment, at, is_base)
        if size and low < end and begin < low + size:
            yield start, start + segment.size


def _used(segment: Segment, at: int, is_base: bool) -> tuple[int, int]:
    if not is_base:
        return at, segment.stored
    return segment.base, segment.size if segment.kind in ("same", "difference") else 0


def _listed(published: Published, path: str) -> FileEntry:
    entry = published.manifest.stored(path)
    assert entry is not None, "a manifest that is read lists it"
    return entry
