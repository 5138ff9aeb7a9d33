"""Checkpoints of a remote store: listing, the newest one, verification, and reading by ranges."""

from __future__ import annotations

import itertools
import logging
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.core.checkpoint import Checkpoint, parse_manifest, parse_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import MANIFEST, STATE, FileEntry
from verl.checkpoint.read.reader import CheckpointReader, Level, tiling_faults
from verl.checkpoint.remote.commit_log import CommitLog, LogRecord
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointUnsupported,
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
                    for _ in checkpoint.checked_leaves(entry, fetch_leaves(self.store, entry), " of its object"):
                        pass
                except CheckpointCorrupt as error:
                    others += error.faults
        if missing:
            raise CheckpointIncomplete(checkpoint.directory, missing + others)
        if others:
            raise CheckpointCorrupt(checkpoint.directory, others)
        return checkpoint

    def survey(self, level: Level = "quick") -> tuple[list[RemoteCheckpoint], list[BadCheckpoint]]:
        """Checkpoints that verify, the newest last, and what is wrong with each of the others."""
        good, bad = [], []
        for record in self.records():
            try:
                good.append(self.verified(record, level))
            except BadCheckpoint as error:
                bad.append(error)
        return good, bad

    def newest(self) -> RemoteCheckpoint:
        """The newest complete checkpoint.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointUnsupported: another version of verl saved here.
        """
        for record in reversed(self.records()):
            try:
                return self.verified(record)
            except CheckpointUnsupported:
                raise
            except BadCheckpoint as error:
                log.error("NOT USING checkpoint %s", error)
        raise CheckpointNotFound(f"{self.store.address} holds no complete checkpoint")

    def reader(self, checkpoint: RemoteCheckpoint, writable: bool = False) -> RemoteReader:
        return RemoteReader(self.store, checkpoint, writable)

    def state(self, checkpoint: RemoteCheckpoint) -> dict[str, Any]:
        """All of its `trainer_state.json`."""
        return parse_state(checkpoint.directory, self.reader(checkpoint).read(STATE))

    def directory(self, record: LogRecord) -> Path:
        """Address of a checkpoint, for messages."""
        return Path(self.store.address.replace("://", ":/"), record.name)


class RemoteReader(CheckpointReader):
    """Reads one checkpoint of a tier: fetches each leaf that contains requested bytes once, and always hashes it.

    Other tensors are not read. Fetched leaves stay in memory during the lifetime of the reader.
    """

    def __init__(self, store: ObjectStore, checkpoint: RemoteCheckpoint, writable: bool = False):
        super().__init__(checkpoint, FileSystem(), verify=True, writable=writable)
        self._store = store

    def _open_file(self, entry: FileEntry) -> memoryview:
        """Memory for the file, allocated lazily by the system."""
        return memoryview(mmap.mmap(-1, entry.size) if entry.size else bytearray())

    def _verify(self, entry: FileEntry, data: memoryview, begin: int, end: int) -> None:
        ends, checked = self._ends[entry.path], self._checked[entry.path]
        starts = [0, *ends]
        unread = [n for n, done in enumerate(checked) if not done and ends[n] > begin and starts[n] < end]
        for _, run in itertools.groupby(enumerate(unread), lambda place: place[1] - place[0]):  # consecutive leaves
            numbers = [number for _, number in run]
            low, high = starts[numbers[0]], ends[numbers[-1]]
            at = low
            try:
                for leaf in fetch_leaves(self._store, entry, numbers[0], numbers[-1] + 1):
                    data[at : at + len(leaf)] = leaf
                    at += len(leaf)
            except (ObjectNotFound, ObjectDamaged) as error:
                fault = self.checkpoint.fault(entry.path, str(error), low, high)
                raise CheckpointIncomplete(self.checkpoint.directory, [fault]) from error
            super()._verify(entry, data, low, high)


def object_key(entry: FileEntry) -> str:
    """The key of a file's object."""
    return f"{OBJECTS}{entry.blake3}-{entry.size}"


def fetch_leaves(store: ObjectStore, entry: FileEntry, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """The bytes of the leaves [first, last) of a file, from its object, unchecked."""
    sizes = [leaf.size for leaf in entry.leaves[:last]]
    return regrouped(store.pieces(object_key(entry), sum(sizes[:first]), sum(sizes)), sizes[first:])


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
