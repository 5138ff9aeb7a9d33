"""Reads files and tensors of a checkpoint as bytes, which are hashed while they are read; only requested ranges are
read."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import ITEM_BYTES, FileEntry, LogicalTensor, SavedSlice
from verl.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound, FileFault


class CheckpointReader:
    """Reads one checkpoint.

    >>> reader = CheckpointReader(checkpoint, disk)
    >>> config = bytes(reader.read("actor/config.json"))
    >>> weight = reader.tensor("actor", "model.norm.weight")  # row-major bytes of the whole tensor

    Args:
        verify: hash every leaf the first time that bytes of it are read.
        writable: return writable views; changes stay in this process.
    """

    def __init__(
        self, checkpoint: Checkpoint, disk: FileSystem | None = None, verify: bool = True, writable: bool = False
    ):
        self.checkpoint, self.verify, self.writable = checkpoint, verify, writable
        self._disk = disk or FileSystem()
        self._disk.contain(checkpoint.directory)
        self._entries = checkpoint.manifest.contents
        self._tensors = {(tensor.component, tensor.name): tensor for tensor in checkpoint.manifest.tensors}
        self._maps: dict[str, memoryview] = {}
        self._ends: dict[str, list[int]] = {}  # of the leaves of each mapped file
        self._checked: dict[str, bytearray] = {}  # one flag for each leaf

    def files(self, component: str = "") -> list[FileEntry]:
        """The files of a component, or all of them."""
        return [
            entry for entry in self._entries.values() if entry.path.startswith(f"{component}/" if component else "")
        ]

    def tensors(self, component: str) -> list[LogicalTensor]:
        """The tensors of a component."""
        return [tensor for (name, _), tensor in self._tensors.items() if name == component]

    def read(self, path: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes of a file as a view of the mapped file, which stays mapped during the lifetime of the view.

        Raises:
            CheckpointCorrupt: they differ from what was written; names the tensors.
        """
        entry = self._entries.get(path)
        if entry is None:
            raise CheckpointNotFound(f"{self.checkpoint.directory} has no file {path}")
        end = entry.size if end is None else end
        data = self._map(entry)
        if self.verify:
            self._verify(entry, data, begin, end)
        return data[begin:end]

    def check(self, path: str) -> None:
        """Hash every byte of a file, unless `verify` is off; uses memory for one leaf.

        Raises:
            CheckpointCorrupt: they are not what was written.
        """
        for _ in self.pieces(path) if self.verify else ():
            pass

    def pieces(self, path: str) -> Iterator[memoryview]:
        """Yield the whole content of a file, one leaf at a time.

        Raises:
            CheckpointCorrupt: bytes are not those that were written.
        """
        entry = self._entries.get(path)
        if entry is None:
            raise CheckpointNotFound(f"{self.checkpoint.directory} has no file {path}")
        begin = 0
        for leaf in entry.leaves:
            yield self.read(path, begin, begin + leaf.size)
            begin += leaf.size
        if not entry.leaves:
            self.read(path)

    def tensor(self, component: str, name: str) -> memoryview:
        """The bytes of a whole tensor, row-major: a view if one slice contains it, otherwise assembled from its
        slices.

        Raises:
            CheckpointNotFound: there is no such tensor.
        """
        tensor = self._tensors.get((component, name))
        if tensor is None:
            raise CheckpointNotFound(f"{self.checkpoint.directory} has no tensor {component}/{name}")
        whole = (0,) * len(tensor.shape), tensor.shape
        if single := [part for part in tensor.slices if (part.start, part.extent) == whole]:
            return self._slice(tensor, single[0])
        result = memoryview(bytearray(tensor.num_bytes))
        for part in tensor.slices:
            held, begin = self._slice(tensor, part), 0
            for offset, length in _runs(part, tensor.shape):
                low, size = offset * ITEM_BYTES[tensor.dtype], length * ITEM_BYTES[tensor.dtype]
                result[low : low + size] = held[begin : begin + size]
                begin += size
        return result if self.writable else result.toreadonly()

    def digest(self, without: Collection[str] = ()) -> str:
        """Digest of every tensor's name, type, shape and bytes, independent of the number of writers.

        Args:
            without: components to leave out, such as `rng`, which differs between processes.
        """
        digests = []
        for tensor in (saved for saved in self.checkpoint.manifest.tensors if saved.component not in without):
            content = digest_of(self.tensor(tensor.component, tensor.name))
            digests.append(f"{tensor.full_name} {tensor.dtype} {list(tensor.shape)} {content}\n")
        return digest_of("".join(digests).encode())

    def _slice(self, tensor: LogicalTensor, part: SavedSlice) -> memoryview:
        return self.read(part.file, part.offset, part.offset + tensor.slice_bytes(part))

    def _map(self, entry: FileEntry) -> memoryview:
        if entry.path in self._maps:
            return self._maps[entry.path]
        try:
            data = self._open_file(entry)
        except OSError as error:
            fault = FileFault(entry.path, f"it cannot be read: {error.strerror or error}")
            raise CheckpointIncomplete(self.checkpoint.directory, [fault]) from error
        if len(data) != entry.size:
            fault = FileFault(entry.path, f"it has {len(data)} bytes instead of {entry.size}")
            raise CheckpointCorrupt(self.checkpoint.directory, [fault])
        self._ends[entry.path] = list(itertools.accumulate(leaf.size for leaf in entry.leaves))
        self._checked[entry.path] = bytearray(len(entry.leaves))
        self._maps[entry.path] = data
        return data

    def _open_file(self, entry: FileEntry) -> memoryview:
        return self._disk.map(self.checkpoint.path(entry.path), self.writable)

    def _verify(self, entry: FileEntry, data: memoryview, begin: int, end: int) -> None:
        ends, checked = self._ends[entry.path], self._checked[entry.path]
        for number in range(bisect.bisect_right(ends, begin), len(ends)):
            low, high = ends[number] - entry.leaves[number].size, ends[number]
            if low >= end:
                break
            if not checked[number] and digest_of(data[low:high]) != entry.leaves[number].blake3:
                problem = f"bytes {low} to {high} are not those that were written"
                raise CheckpointCorrupt(
                    self.checkpoint.directory, [self.checkpoint.fault(entry.path, problem, low, high)]
                )
            checked[number] = True


def _runs(part: SavedSlice, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The elements of a slice as runs that are contiguous in the whole tensor, in order: (offset there, length)."""
    last = len(shape) - 1  # of the dimensions over which runs follow each other; those behind it are whole
    while last > 0 and part.extent[last] == shape[last]:
        last -= 1
    for index in itertools.product(*(range(a, b) for a, b in zip(part.start[:last], part.end[:last]))):
        offset = 0
        for i, size in zip((*index, *part.start[last:]), shape):
            offset = offset * size + i
        yield offset, math.prod(part.extent[last:])
