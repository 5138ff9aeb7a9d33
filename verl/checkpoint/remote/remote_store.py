"""Checkpoints of a remote store: listing, the newest one, and verification."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.core.checkpoint import Checkpoint, parse_manifest, parse_state
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import MANIFEST, STATE, FileEntry
from verl.checkpoint.read.reader import Level, tiling_faults
from verl.checkpoint.remote.commit_log import CommitLog, LogRecord
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointTooNew,
    FileFault,
    ObjectDamaged,
    ObjectNotFound,
)
from verl.storage.store import ObjectStore

log = logging.getLogger(__name__)

OBJECTS, MANIFESTS = "objects/", "manifests/"


@dataclass(frozen=True)
class RemoteCheckpoint(Checkpoint):
    """A checkpoint of a tier whose manifest matches the log.

    Attributes:
        directory: its address, for messages.
        data: of the manifest.
        record: of the log.
    """

    data: bytes
    record: LogRecord


class RemoteStore:
    """The checkpoints of one tier, for reading.

        tier = RemoteStore(storage_at("s3://models/verl/ppo").connect())
        tier.newest().step
    3200

    Every method raises StorageError if the store does not answer.
    """

    def __init__(self, store: ObjectStore):
        self.store = store
        self.log = CommitLog(store)

    def records(self) -> list[LogRecord]:
        """Records of all checkpoints, the newest last, without duplicates."""
        records = {record.manifest: record for record in self.log.records() if record.kind == "checkpoint"}
        return sorted(records.values(), key=lambda record: (record.sequence, record.number))

    def open(self, record: LogRecord) -> RemoteCheckpoint:
        """Read a checkpoint's manifest.

        Raises:
            BadCheckpoint: it is missing, or does not match the log.
        """
        where = self.directory(record)
        try:
            data = bytes(self.store.get(f"{MANIFESTS}{record.manifest}.json", 0, record.manifest_bytes))
        except ObjectNotFound as error:
            raise CheckpointIncomplete(where, [FileFault(MANIFEST, "it is missing")]) from error
        except ObjectDamaged as error:
            raise CheckpointCorrupt(where, [FileFault(MANIFEST, str(error))]) from error
        if digest_of(data) != record.manifest:
            raise CheckpointCorrupt(where, [FileFault(MANIFEST, "it is not the manifest that the log names")])
        return RemoteCheckpoint(where, parse_manifest(where, data), data, record)

    def find(self, name: str | None = None) -> LogRecord:
        """The last record of a name; without a name, that of the newest checkpoint.

        Raises:
            CheckpointNotFound: there is none.
        """
        named = [record for record in self.records() if name in (None, record.name)]
        if not named:
            what = "holds no checkpoint" if name is None else f"has no checkpoint {name}"
            raise CheckpointNotFound(f"{self.store.address} {what}")
        return named[-1]

    def verified(self, record: LogRecord, level: Level = "quick") -> RemoteCheckpoint:
        """Open a checkpoint after verification: its objects exist and have the right sizes; with `full`, every byte is
        hashed.

        Raises:
            BadCheckpoint: with everything that is wrong, by file.
        """
        checkpoint = self.open(record)
        missing, others = [], list(tiling_faults(checkpoint))
        for entry in checkpoint.manifest.files:
            size = self.store.find(object_key(entry)) if entry.size else 0
            if size is None:
                missing.append(checkpoint.fault(entry.path, "its object is missing"))
            elif size != entry.size:
                others.append(checkpoint.fault(entry.path, f"its object has {size} bytes, not {entry.size}"))
            elif level == "full":
                try:
                    for _ in self.leaves(checkpoint, entry):
                        pass
                except CheckpointCorrupt as error:
                    others += error.faults
        if missing:
            raise CheckpointIncomplete(checkpoint.directory, missing + others)
        if others:
            raise CheckpointCorrupt(checkpoint.directory, others)
        return checkpoint

    def newest(self) -> RemoteCheckpoint:
        """The newest complete checkpoint.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointTooNew: a later version of verl saved here.
        """
        for record in reversed(self.records()):
            try:
                return self.verified(record)
            except CheckpointTooNew:
                raise
            except BadCheckpoint as error:
                log.error("NOT USING checkpoint %s", error)
        raise CheckpointNotFound(f"{self.store.address} holds no complete checkpoint")

    def leaves(self, checkpoint: RemoteCheckpoint, entry: FileEntry) -> Iterator[bytes]:
        """The leaves of a file, from its object, each given once it is checked.

        Raises:
            CheckpointIncomplete: the object is missing.
            CheckpointCorrupt: it is not what was written.
        """
        sizes = [leaf.size for leaf in entry.leaves]
        pieces = regrouped(self.store.pieces(object_key(entry), 0, entry.size), sizes)
        try:
            yield from checkpoint.checked_leaves(entry, pieces, " of its object")
        except ObjectNotFound as error:
            fault = checkpoint.fault(entry.path, "its object is missing")
            raise CheckpointIncomplete(checkpoint.directory, [fault]) from error
        except ObjectDamaged as error:
            raise CheckpointCorrupt(checkpoint.directory, [checkpoint.fault(entry.path, str(error))]) from error

    def state(self, checkpoint: RemoteCheckpoint) -> dict[str, Any]:
        """All of its `trainer_state.json`."""
        data = b"".join(self.leaves(checkpoint, checkpoint.manifest.contents[STATE]))
        return parse_state(checkpoint.directory, data)

    def directory(self, record: LogRecord) -> Path:
        """Address of a checkpoint, for messages."""
        return Path(self.store.address.replace("://", ":/"), record.name)


def object_key(entry: FileEntry) -> str:
    """The key of a file's object."""
    return f"{OBJECTS}{entry.blake3}-{entry.size}"


def regrouped(pieces: Iterable[bytes], sizes: Iterable[int]) -> Iterator[bytes]:
    """The same bytes in pieces of other sizes, the last of which may be shorter; a piece that fits is not copied."""
    coming, piece, rest = iter(pieces), b"", memoryview(b"")
    for size in sizes:
        parts: list[memoryview] = []
        while (missing := size - sum(map(len, parts))) and (rest or (piece := next(coming, b""))):
            rest = rest or memoryview(piece)
            parts.append(rest[:missing])
            rest = rest[missing:]
        if not parts:
            return
        yield piece if len(parts) == 1 and len(parts[0]) == len(piece) else b"".join(parts)
