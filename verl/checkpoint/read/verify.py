"""Verification of a checkpoint, at three levels of effort.

quick COMMIT, sizes, unlisted and missing files, safetensors headers, tiling; milliseconds; at every discovery
load    the hash of what is read; `reader.py`
full    every byte; names the file and the tensor
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from verl.checkpoint.core.checkpoint import Checkpoint, open_checkpoint, read_state
from verl.checkpoint.core.filesystem import OUT_OF_RESOURCES, FileSystem, files_below
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import COMMIT, MANIFEST, STATE, FileEntry, content_digest
from verl.checkpoint.core.safetensors_format import TensorPlace, header_bytes, read_header
from verl.errors import BadCheckpoint, CheckpointCorrupt, CheckpointIncomplete, FileFault, VerlError
from verl.utils.external_input import ExternalInputError, parse_mapping

Level = Literal["quick", "full"]
INDEX_LIMIT_BYTES = 256 << 20


def open_verified(disk: FileSystem, directory: Path, level: Level = "quick") -> Checkpoint:
    """Open a checkpoint that passes at this level.

    Raises:
        BadCheckpoint: with all faults, by file.
    """
    checkpoint = open_checkpoint(disk, directory)
    try:
        missing, others = quick_faults(disk, checkpoint)
        if not missing and level == "full":
            others += full_faults(disk, checkpoint)
    except FileNotFoundError as error:  # it is being pruned while we look
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


def verify(disk: FileSystem, directory: Path, level: Level = "quick") -> list[FileFault]:
    """All faults of a checkpoint, by file; empty if it passes.

    >>> verify(FileSystem(), Path("checkpoints/latest"), "full")
    []
    """
    try:
        open_verified(disk, directory, level)
    except BadCheckpoint as error:
        return list(error.faults)
    return []


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
        others += [*tiling_faults(checkpoint)] or [*_header_faults(disk, checkpoint), *_index_faults(disk, checkpoint)]
    return missing, others


def _index_faults(disk: FileSystem, checkpoint: Checkpoint) -> Iterator[FileFault]:
    """Files that an index of weights names and the manifest does not, which would be loaded without being hashed."""
    contents = checkpoint.manifest.contents
    for entry in checkpoint.manifest.files:
        if not entry.path.endswith(".index.json"):
            continue
        above = entry.path.rpartition("/")[0]
        try:
            weights = parse_mapping(disk.read(checkpoint.path(entry.path), INDEX_LIMIT_BYTES)).get("weight_map")
        except ExternalInputError as error:
            yield FileFault(entry.path, str(error))
            continue
        names = weights.values() if isinstance(weights, dict) else [weights]
        unknown = {repr(name) for name in names if not isinstance(name, str) or f"{above}/{name}" not in contents}
        for name in sorted(unknown):
            yield FileFault(entry.path, f"it names {name[:200]}, which the manifest does not list")


def full_faults(disk: FileSystem, checkpoint: Checkpoint) -> list[FileFault]:
    """Every file whose bytes differ from what was written, with the affected tensors."""
    # Read, not mapped: a broken sector is an error here, and would be the end of the process there.
    faults = [
        fault
        for entry in checkpoint.manifest.files
        for fault in content_faults(checkpoint, entry, partial(disk.read_range, checkpoint.path(entry.path)))
    ]
    if not faults and checkpoint.manifest.file(STATE):
        written = read_state(disk, checkpoint).get("manifest_checksum")
        if written != content_digest(checkpoint.manifest):
            faults.append(FileFault(STATE, "its manifest_checksum is not that of this checkpoint"))
    return faults


def content_faults(checkpoint: Checkpoint, entry: FileEntry, read: Callable[[int, int], bytes]) -> Iterator[FileFault]:
    """The leaves of a file that are not what was written.

    Args:
        read: returns a leaf, given the offset of its first byte and its size; called in order.
    """
    begin = 0
    for leaf in entry.leaves:
        end = begin + leaf.size
        try:
            is_good = digest_of(read(begin, leaf.size)) == leaf.blake3
            problem = f"bytes {begin} to {end} are not those that were written"
        except VerlError:  # of a store
            raise
        except OSError as error:
            is_good, problem = False, f"bytes {begin} to {end} cannot be read: {error.strerror or error}"
        if not is_good:
            yield checkpoint.fault(entry.path, problem, begin, end)
        begin = end


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
            places = _places(disk, checkpoint, file)
        except ValueError as error:
            yield checkpoint.fault(file, str(error))
            continue
        for tensor, part in parts:
            stored = places.get(part.key or "")
            expected = (tensor.dtype, part.extent, part.offset)
            if part.key is not None and (stored is None or (stored.dtype, stored.shape, stored.begin) != expected):
                yield FileFault(
                    file, f"its header does not hold {part.key!r} as the manifest says", (tensor.full_name,)
                )


def _places(disk: FileSystem, checkpoint: Checkpoint, file: str) -> dict[str, TensorPlace]:
    def read(size: int) -> bytes | memoryview:
        return disk.read_range(checkpoint.path(file), 0, size)

    whole = checkpoint.manifest.contents[file].size
    return read_header(read(header_bytes(read(8))), whole)
