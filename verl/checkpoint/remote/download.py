"""Download of one checkpoint from a remote store into a directory, where it is committed as if it had been saved
there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import confirm_upload, manifest_digest
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import (
    FileSystem,
    duplicate,
    make_directories,
    read_errors,
    write_by_rename,
    write_errors,
    write_file,
)
from verl.checkpoint.core.manifest import COMMIT, MANIFEST, FileEntry, commit_line
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.read.verify import open_verified
from verl.checkpoint.remote.commit_log import LogRecord
from verl.checkpoint.remote.remote_store import RemoteCheckpoint, RemoteStore
from verl.errors import BadCheckpoint, CheckpointCorrupt, CheckpointIncomplete, ObjectDamaged, ObjectNotFound


def pull(tier: RemoteStore, record: LogRecord, store: CheckpointStore, anew: bool = False) -> Checkpoint:
    """Download a checkpoint unless it exists; files that another checkpoint of the directory has are linked.

    Every byte is hashed before the checkpoint is published, by one rename, under its original name.

    Args:
        anew: download it although it exists, because the local copy is damaged.
    Raises:
        BadCheckpoint: a part is missing in the store, or differs from what was written.
        NoSpaceForCheckpoint, CheckpointWriteFailed: it cannot be written; nothing was published.
        CheckpointReadFailed: the directory cannot be read.
        StorageError: the store does not answer.
    """
    with read_errors(f"looking at {store.directory}"):
        here = None if anew else local_copy(store, record.manifest)
        if here is not None:
            return here
        checkpoint = tier.open(record)
        known = _files_by_content(store)
        store.borrow_claim()  # a trainer that is saving there stays the owner
    needed = sum(entry.size for entry in checkpoint.manifest.files if (entry.blake3, entry.size) not in known)
    begun = store.begin(checkpoint.step, needed_bytes=needed, needed_files=len(checkpoint.manifest.files))
    with begun as transaction, write_errors(f"fetching {record.name}"):
        for entry in checkpoint.manifest.files:
            _fetch(
                tier, checkpoint, entry, transaction.directory / entry.path, transaction.directory, store.disk, known
            )
        write_by_rename(store.disk, transaction.directory / MANIFEST, checkpoint.data)
        write_by_rename(store.disk, transaction.directory / COMMIT, commit_line(checkpoint.data))
        with store.locked():
            fetched = transaction.rename(checkpoint.manifest, record.name)
    confirm_upload(store.disk, fetched, record.manifest, tier.store.address)
    return fetched


def local_copy(directory: CheckpointDirectory, manifest: str) -> Checkpoint | None:
    """The checkpoint with this manifest, if it is complete in a directory."""
    for path in directory.candidates():
        with contextlib.suppress(BadCheckpoint, FileNotFoundError):
            checkpoint = open_verified(directory.disk, path)
            if manifest_digest(directory.disk, checkpoint) == manifest:
                return checkpoint
    return None


def _files_by_content(directory: CheckpointDirectory) -> dict[tuple[str, int], tuple[Checkpoint, str]]:
    """The files of the directory's checkpoints, by digest and size."""
    return {
        (entry.blake3, entry.size): (checkpoint, entry.path)
        for checkpoint in directory.complete()
        for entry in checkpoint.manifest.files
    }


def _fetch(
    tier: RemoteStore,
    published: RemoteCheckpoint,
    entry: FileEntry,
    target: Path,
    root: Path,
    disk: FileSystem,
    known: dict[tuple[str, int], tuple[Checkpoint, str]],
) -> None:
    make_directories(disk, target.parent, root)
    if (source := known.get((entry.blake3, entry.size))) is not None:
        checkpoint, path = source
        with contextlib.suppress(BadCheckpoint):
            CheckpointReader(checkpoint, disk).check(path)
            if duplicate(disk, checkpoint.path(path), target):
                return
    try:
        leaves = write_file(disk, target, published.checked_leaves(entry, tier.leaves(entry), " of its object"))
    except ObjectNotFound as error:
        fault = published.fault(entry.path, "its object is missing")
        raise CheckpointIncomplete(published.directory, [fault]) from error
    except ObjectDamaged as error:
        raise CheckpointCorrupt(published.directory, [published.fault(entry.path, str(error))]) from error
    assert leaves == entry.leaves, "each was compared before it was written"
