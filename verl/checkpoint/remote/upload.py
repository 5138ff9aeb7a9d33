"""Upload of one checkpoint into a remote store: objects, then the manifest, then its record in the commit log."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import MANIFEST, FileEntry
from verl.checkpoint.remote.commit_log import CommitLog, LogRecord
from verl.checkpoint.remote.remote_store import MANIFESTS, object_key, regrouped
from verl.errors import CheckpointCorrupt, CheckpointIncomplete
from verl.storage.store import ObjectStore

SMALL_BYTES, AT_ONCE = 2**20, 4


@dataclass
class UploadResult:
    """Result of a push.

    Attributes:
        record: of the log.
        sent_bytes, num_sent: of objects that the store did not have.
    """

    record: LogRecord
    sent_bytes: int = 0
    num_sent: int = 0


@dataclass
class CheckpointUpload:
    """Puts checkpoints into one tier.

    Args:
        log: of the tier, with the claim of this trainer, or with none to push beside it.
    """

    store: ObjectStore
    log: CommitLog
    disk: FileSystem = field(default_factory=FileSystem)
    _there: set[str] = field(default_factory=set)

    def push(self, checkpoint: Checkpoint) -> UploadResult:
        """Put a checkpoint, of which what the store has already is not sent again. May be killed, and done again.

        Every byte is hashed on its way: what differs from what was written is never uploaded.

        Raises:
            CheckpointCorrupt: a file is not what was written.
            CheckpointIncomplete: a file is gone.
            CheckpointFenced: another trainer has claimed the tier.
            StorageError: the store does not answer, or refuses.
        """
        data = self.disk.read(checkpoint.path(MANIFEST), 2**31)
        digest = digest_of(data)
        for record in self.log.records():
            if record.kind == "checkpoint" and record.manifest == digest:
                return UploadResult(record)
        sent = self.put_objects(checkpoint)
        self.store.put(f"{MANIFESTS}{digest}.json", data)
        record = self.log.append(
            name=checkpoint.name, manifest=digest, manifest_bytes=len(data), sequence=checkpoint.sequence,
            step=checkpoint.step,
        )  # fmt: skip
        return UploadResult(record, sent_bytes=sum(entry.size for entry in sent), num_sent=len(sent))

    def put_objects(self, checkpoint: Checkpoint) -> list[FileEntry]:
        """Upload small files concurrently, since each costs a round trip, and large ones one by one in parts."""
        entries = {object_key(entry): entry for entry in checkpoint.manifest.files if entry.size}
        unsent = [entry for key, entry in entries.items() if key not in self._there]
        small = [entry for entry in unsent if entry.size <= SMALL_BYTES]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="push") as threads:
            futures = [threads.submit(self._put, checkpoint, entry) for entry in small]
            try:
                sent = [future.result() for future in futures]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        sent += [self._put(checkpoint, entry) for entry in unsent if entry.size > SMALL_BYTES]
        return [entry for entry in sent if entry is not None]

    def _put(self, checkpoint: Checkpoint, entry: FileEntry) -> FileEntry | None:
        """Put a file unless it is there."""
        key = object_key(entry)
        stored = self.store.find(key)
        if stored is not None and stored.size == entry.size:
            self._there.add(key)
            return None
        length = self.store.part_bytes(entry.size)
        self.store.put_pieces(key, lambda: checked_pieces(self.disk, checkpoint, entry, length), entry.size)
        self._there.add(key)
        return entry


def checked_pieces(disk: FileSystem, checkpoint: Checkpoint, entry: FileEntry, length: int) -> Iterator[bytes]:
    """A file in pieces of a length, each given once it is known to be what was written."""
    return regrouped(checkpoint.checked_leaves(entry, _leaves(disk, checkpoint, entry)), repeat(length))


def _leaves(disk: FileSystem, checkpoint: Checkpoint, entry: FileEntry) -> Iterator[bytes]:
    begin = 0
    for leaf in entry.leaves:
        end = begin + leaf.size
        try:
            yield disk.read_range(checkpoint.path(entry.path), begin, leaf.size)
        except FileNotFoundError as error:
            fault = checkpoint.fault(entry.path, "it is missing", begin, end)
            raise CheckpointIncomplete(checkpoint.directory, [fault]) from error
        except OSError as error:
            fault = checkpoint.fault(entry.path, f"it cannot be read: {error.strerror or error}", begin, end)
            raise CheckpointCorrupt(checkpoint.directory, [fault]) from error
        begin = end
