"""Reads files and tensors of a checkpoint as bytes, hashed while they are read, and verifies whole checkpoints.

Only requested ranges are read. There are three levels of verification:

quick   COMMIT, sizes, unlisted and missing files, safetensors headers, tiling; milliseconds; at every discovery
load    the hash of what is read
full    the hash of every byte; faults name the file and the tensors
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from verl.checkpoint.core.checkpoint import Checkpoint, open_checkpoint, read_state
from verl.checkpoint.core.filesystem import OUT_OF_RESOURCES, FileSystem, files_below
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import (
    COMMIT,
    ITEM_BYTES,
    MANIFEST,
    STATE,
    FileEntry,
    LogicalTensor,
    SavedSlice,
    content_digest,
)
from verl.checkpoint.core.safetensors_format import header_bytes, read_header
from verl.errors import BadCheckpoint, CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound, FileFault

Level = Literal["quick", "full"]


class CheckpointReader:
    """Reads one checkpoint.

    >>> reader = CheckpointReader(checkpoint, disk)
    >>> config = bytes(reader.read("actor/config.json"))
    >>> weight = reader.tensor("actor", "model.norm.weight")  # row-major bytes of the whole tensor

    Args:
        verify: hash each leaf when its bytes are first read.
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
        return [tensor for (name, _), tensor in self._tensors.items() if name == component]

    def read(self, path: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes of a file as a view of the mapped file, which stays mapped during the lifetime of the view.

        Raises:
            CheckpointCorrupt: the bytes differ from what was written; with the affected tensors.
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
            CheckpointCorrupt: the bytes differ from what was written.
        """
        entry, begin = self._entries.get(path), 0
        if entry is None or not entry.leaves:
            self.read(path)
        for leaf in entry.leaves if entry is not None and self.verify else ():
            self.read(path, begin, begin + leaf.size)
            begin += leaf.size

    def tensor(self, component: str, name: str) -> memoryview:
        """The bytes of a whole tensor, row-major: a view if one slice contains it, otherwise assembled from its
        slices.

        Raises:
            CheckpointNotFound: the checkpoint has no such tensor.
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
            data = self._disk.map(self.checkpoint.path(entry.path), self.writable)
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

    def _verify(self, entry: FileEntry, data: memoryview, begin: int, end: int) -> None:
        ends, checked = self._ends[entry.path], self._checked[entry.path]
        for number in range(bisect.bisect_right(ends, begin), len(ends)):
            low, high = ends[number] - entry.leaves[number].size, ends[number]
            if low >= end:
                break
            if not checked[number]:
                self.checkpoint.check_leaf(entry, number, low, data[low:high])
            checked[number] = True


def _runs(part: SavedSlice, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Contiguous runs of a slice within the whole tensor, in order: (offset in the tensor, length), in elements."""
    last = len(shape) - 1  # dimension along which a run extends; the slice is whole in those after it
    while last > 0 and part.extent[last] == shape[last]:
        last -= 1
    for index in itertools.product(*(range(a, b) for a, b in zip(part.start[:last], part.end[:last]))):
        offset = 0
        for i, size in zip((*index, *part.start[last:]), shape):
            offset = offset * size + i
        yield offset, math.prod(part.extent[last:])


def open_verified(disk: FileSystem, directory: Path, level: Level = "quick") -> Checkpoint:
    """Open a checkpoint and verify it at this level.

    Raises:
        BadCheckpoint: it does not pass; with all faults, by file.
    """
    checkpoint = open_checkpoint(disk, directory)
    try:
        missing, others = quick_faults(disk, checkpoint)
        if not missing and level == "full":
            others += full_faults(disk, checkpoint)
    except FileNotFoundError as error:  # it is being pruned at the same time
        raise CheckpointIncomplete(directory, [FileFault(_named(directory, error), "it vanished")]) from error
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        fault = FileFault(_named(directory, error), f"it cannot be read: {error.strerror or error}")
        raise CheckpointCorrupt(directory, [fault]) from error
    if missing:
        raise CheckpointIncomplete(directory, missing + others)
    if others:
        raise CheckpointCorrupt(directory, others)
    return checkpoint


def quick_faults(disk: FileSystem, checkpoint: Checkpoint) -> tuple[list[FileFault], list[FileFault]]:
    """Missing files and other faults that can be found without reading the files' content."""
    sizes, _ = files_below(disk, checkpoint.directory)
    for name in (COMMIT, MANIFEST):
        sizes.pop(name, None)
    missing, others = [], []
    for entry in checkpoint.manifest.files:
        size = sizes.pop(entry.path, None)
        if size is None:
            missing.append(checkpoint.fault(entry.path, "it is missing"))
        elif size != entry.size:
            problem = "it is not a regular file" if size < 0 else f"it has {size} bytes instead of {entry.size}"
            others.append(checkpoint.fault(entry.path, problem))
    others += [FileFault(path, "it is foreign: the manifest does not list it") for path in sizes]
    if not missing and not others:
        others += [*tiling_faults(checkpoint)] or [*_header_faults(disk, checkpoint)]
    return missing, others


def full_faults(disk: FileSystem, checkpoint: Checkpoint) -> list[FileFault]:
    """Every file whose bytes differ from what was written, with the tensors where they first do."""
    faults: list[FileFault] = []
    for entry in checkpoint.manifest.files:
        try:  # read, not mapped: a broken sector is an error here, and would be the end of the process there
            for _ in checked_file(disk, checkpoint, entry):
                pass
        except BadCheckpoint as error:
            faults += error.faults
    if not faults:
        written = read_state(disk, checkpoint).get("manifest_checksum")
        if written != content_digest(checkpoint.manifest):
            faults.append(FileFault(STATE, "its manifest_checksum is not that of this checkpoint"))
    return faults


def checked_file(disk: FileSystem, checkpoint: Checkpoint, entry: FileEntry) -> Iterator[bytes]:
    """The leaves of a file on the disk, each given once it is known to be what was written.

    Raises:
        CheckpointIncomplete: the file is gone.
        CheckpointCorrupt: a leaf is not what was written, or cannot be read; names the tensors.
    """

    def leaves() -> Iterator[bytes]:
        begin = 0
        for leaf in entry.leaves:
            try:
                yield disk.read_range(checkpoint.path(entry.path), begin, leaf.size)
            except OSError as error:
                is_missing = isinstance(error, FileNotFoundError)
                problem = "it is missing" if is_missing else f"it cannot be read: {error.strerror or error}"
                kind = CheckpointIncomplete if is_missing else CheckpointCorrupt
                fault = checkpoint.fault(entry.path, problem, begin, begin + leaf.size)
                raise kind(checkpoint.directory, [fault]) from error
            begin += leaf.size

    return checkpoint.checked_leaves(entry, leaves())


def _named(directory: Path, error: OSError) -> str:
    return Path(os.path.relpath(error.filename or directory, directory)).as_posix()


def tiling_faults(checkpoint: Checkpoint) -> Iterator[FileFault]:
    """Faults of slices that do not tile their tensor, or extend beyond the end of a file."""
    sizes = {entry.path: entry.size for entry in checkpoint.manifest.contents.values()}
    for tensor in checkpoint.manifest.tensors:
        faults = tensor.faults()
        yield from (FileFault(MANIFEST, fault, (tensor.full_name,)) for fault in faults)
        for part in () if faults else tensor.slices:
            if part.offset + tensor.slice_bytes(part) > sizes.get(part.file, -1):
                yield FileFault(part.file, "a slice reaches over its end", (tensor.full_name,))


def _header_faults(disk: FileSystem, checkpoint: Checkpoint) -> Iterator[FileFault]:
    """Faults where the headers of safetensors files and the manifest disagree."""
    for file, parts in checkpoint.slices_by_file.items():
        if all(part.key is None for _, part in parts):
            continue
        try:
            size = header_bytes(disk.read_range(checkpoint.path(file), 0, 8))
            head = disk.read_range(checkpoint.path(file), 0, size)
            places = read_header(head, checkpoint.manifest.contents[file].size)
        except ValueError as error:
            yield checkpoint.fault(file, str(error))
            continue
        for tensor, part in parts:
            if part.key is not None and places.get(part.key) != (tensor.dtype, part.extent, part.offset):
                yield FileFault(
                    file, f"its header does not hold {part.key!r} as the manifest says", (tensor.full_name,)
                )
