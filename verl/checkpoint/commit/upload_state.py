"""Upload state of a checkpoint directory: the address of its object storage, and which checkpoints that has confirmed.

    cold.json             where the store is, which checkpoints it is to get, and from which number publications go on
    uploaded/NAME         one file for each checkpoint that the store has confirmed, with the digest of its manifest and
                          the address of the store, since a later run may have another one

Plain files, so that retention, which runs in the writer process, decides from what is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem, make_directories, read_errors, write_by_rename, write_errors
from verl.checkpoint.core.manifest import COMMIT, COMMIT_LIMIT_BYTES
from verl.checkpoint.read.discovery import COLD, UPLOADED, CheckpointDirectory
from verl.utils.external_input import ExternalInputError, parse_as

log = logging.getLogger(__name__)

LIMIT_BYTES = 65_536


@dataclass(frozen=True, kw_only=True)
class UploadTarget:
    """The store behind a directory.

    Args:
        address: of the tier, such as `s3://models/verl/ppo`.
        upload_interval: upload every n-th checkpoint, and each with a tag.
        upload_interval_s: of those, at most one per this many seconds (the newest), and each with a tag; 0: all.
        keep_waiting: maximum number of checkpoints kept on the local disk only because they are not yet uploaded.
        sequence_floor: the highest number of a publication in the store when the run began.
    """

    address: str
    upload_interval: PositiveInt = 1
    upload_interval_s: float = 0.0
    keep_waiting: NonNegativeInt = 8
    sequence_floor: NonNegativeInt = 0

    def wants(self, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint is to be uploaded, regardless of later ones."""
        return checkpoint.manifest.tag is not None or (not self.upload_interval_s and self.counts(checkpoint))

    def counts(self, checkpoint: Checkpoint) -> bool:
        """Whether `upload_interval` selects this checkpoint."""
        return checkpoint.sequence % self.upload_interval == 0


def write_upload_target(disk: FileSystem, directory: Path, cold: UploadTarget | None) -> None:
    """Record the object storage of an existing directory; None removes the record."""
    with write_errors(f"recording the store behind {directory}"):
        if cold is not None:
            write_by_rename(disk, directory / COLD, json.dumps(asdict(cold), indent=2).encode() + b"\n")
        else:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(directory / COLD)
        disk.sync_directory(directory)


def read_upload_target(disk: FileSystem, directory: Path) -> UploadTarget | None:
    """The object storage of a directory; None if there is none."""
    try:
        return parse_as(UploadTarget, disk.read(directory / COLD, LIMIT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ExternalInputError as error:
        log.error("%s is not a valid upload record: %s", directory / COLD, error)
        return None


def manifest_digest(disk: FileSystem, checkpoint: Checkpoint) -> str:
    """The digest of a checkpoint's manifest, which identifies it in every location."""
    return disk.read(checkpoint.directory / COMMIT, COMMIT_LIMIT_BYTES).split()[0].decode("ascii", "replace")


def confirm_upload(disk: FileSystem, checkpoint: Checkpoint, digest: str, address: str) -> None:
    """Record durably that the store at an address has a checkpoint; after this, retention may remove the local
    copy."""
    directory = checkpoint.directory.parent / UPLOADED
    with write_errors(f"recording the upload of {checkpoint.name}"):
        make_directories(disk, directory, checkpoint.directory.parent)
        write_by_rename(disk, directory / checkpoint.name, f"{digest} {address}\n".encode())
        disk.sync_directory(directory)


def is_upload_confirmed(disk: FileSystem, checkpoint: Checkpoint, address: str) -> bool:
    """Whether the store at this address has confirmed this checkpoint."""
    try:
        recorded = disk.read(checkpoint.directory.parent / UPLOADED / checkpoint.name, LIMIT_BYTES)
        return recorded.decode(errors="replace").rstrip("\n") == f"{manifest_digest(disk, checkpoint)} {address}"
    except (FileNotFoundError, NotADirectoryError):
        return False


def last_upload(disk: FileSystem, directory: Path) -> float | None:
    """When the store last confirmed a checkpoint of a directory, in seconds of this machine's clock."""
    times = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in disk.names(directory / UPLOADED):
            with contextlib.suppress(FileNotFoundError):  # forgotten meanwhile
                times.append(disk.status(directory / UPLOADED / name).st_mtime)
    return max(times, default=None)


def withdraw_confirmation(disk: FileSystem, checkpoint: Checkpoint) -> None:
    with (
        write_errors(f"recording that {checkpoint.name} is to be uploaded again"),
        contextlib.suppress(FileNotFoundError),
    ):
        disk.unlink(checkpoint.directory.parent / UPLOADED / checkpoint.name)


def forget_removed_uploads(directory: CheckpointDirectory) -> None:
    """Remove the records of checkpoints that are gone from the local disk."""
    records = directory.directory / UPLOADED
    for name in directory.disk.names(records) if directory.exists(records) else []:
        if not directory.exists(directory.directory / name.removesuffix(".tmp")):
            with contextlib.suppress(FileNotFoundError):
                directory.disk.unlink(records / name)


def waiting_for_upload(directory: CheckpointDirectory, complete: list[Checkpoint], kept: Collection[str]) -> set[str]:
    """Checkpoints that are kept, beyond the retention rules, until they are uploaded.

    At most `keep_waiting` are kept; older ones are dropped with a log message, and all of them if the disk has no room
    for another checkpoint as large as the newest.
    """
    cold = read_upload_target(directory.disk, directory.directory)
    if cold is None:
        return set()
    with read_errors("looking for uploads"):
        dropped = [checkpoint for checkpoint in complete if checkpoint.name not in kept and cold.wants(checkpoint)]
        waiting = [
            checkpoint for checkpoint in dropped if not is_upload_confirmed(directory.disk, checkpoint, cold.address)
        ]
        if not waiting:
            return set()
        has_room = directory.disk.space(directory.directory).bytes > 1.1 * complete[-1].num_bytes
    stay = waiting[-cold.keep_waiting :] if has_room and cold.keep_waiting else []
    for checkpoint in waiting:
        if checkpoint not in stay:
            why = f"{cold.keep_waiting} later ones wait too" if has_room else "the disk has no room for the next one"
            log.error("GIVING UP checkpoint %s, which %s has not confirmed: %s", checkpoint.name, cold.address, why)
    return {checkpoint.name for checkpoint in stay}
