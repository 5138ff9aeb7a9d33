"""A checkpoint written out with every file whole, to be taken elsewhere: the same content, without differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from verl.checkpoint.disk import Disk
from verl.checkpoint.files import make_directories, write_by_rename, write_file
from verl.checkpoint.manifest import COMMIT, MANIFEST, Manifest, commit_line
from verl.checkpoint.published import Published
from verl.checkpoint.reader import CheckpointReader
from verl.checkpoint.verify import verified
from verl.checkpoint.written_out import unused, written_out


def materialize(reader: CheckpointReader, out: Path, disk: Disk | None = None) -> Published:
    """Write a checkpoint out. It appears whole or not at all, and its `manifest_checksum` is that of the original.

    >>> materialize(CheckpointManager("checkpoints/latest").reader(), Path("whole"))  # doctest: +SKIP

    Args:
        reader: of the checkpoint, on a disk or in object storage.
        out: must not exist, or be an empty directory.
    Raises:
        ConfigError: `out` is in use.
        CheckpointCorrupt: bytes are not those that were written; nothing is left at `out`.
        CheckpointWriteFailed: the file system refused.
    """
    disk = disk or Disk()
    out, published = unused(disk, out), reader.published
    with written_out(disk, out, f"writing {published.name} out to {out}") as staged:
        _write(reader, staged, disk)
        verified(disk, staged, "full")
    return Published(out, _whole(published.manifest))


def _write(reader: CheckpointReader, staged: Path, disk: Disk) -> None:
    for entry in reader.files():
        target = staged / entry.path
        make_directories(disk, target.parent, staged)
        write_file(disk, target, reader.pieces(entry.path))
    data = _whole(reader.published.manifest).to_bytes()
    write_by_rename(disk, staged / MANIFEST, data)
    write_by_rename(disk, staged / COMMIT, commit_line(data))


def _whole(manifest: Manifest) -> Manifest:
    files = tuple(replace(entry, linked_from=None) for entry in manifest.contents.values())
    return replace(manifest, files=files, deltas=())
