"""Transfer of one checkpoint to and from a remote store.

Upload: objects, then the manifest, then its record in the commit log. Download: into a directory, where the checkpoint
is committed as if it had been saved there.

`CheckpointTier` is the remote tier of a run. Checkpoints that an address or a digest names are brought to the local
disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import UploadTarget, confirm_upload, manifest_digest
from verl.checkpoint.config import Checkpointing
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
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import COMMIT, MANIFEST, FileEntry, commit_line
from verl.checkpoint.read.discovery import FETCHED
from verl.checkpoint.read.reader import CheckpointReader, checked_file
from verl.checkpoint.remote.commit_log import CommitLog, LogRecord
from verl.checkpoint.remote.remote_store import MANIFESTS, RemoteCheckpoint, RemoteStore, object_key
from verl.checkpoint.retention import FEWEST_KEPT, Retention, prune
from verl.errors import (
    BadCheckpoint,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    StorageError,
    StorageRefused,
)
from verl.storage.config import Storage, storage_at, storage_from
from verl.storage.store import ObjectStore

SMALL_BYTES, AT_ONCE = 2**20, 4
log = logging.getLogger(__name__)


def upload(log: CommitLog, checkpoint: Checkpoint, disk: FileSystem | None = None) -> tuple[LogRecord, int]:
    """Put a checkpoint into a tier; what the store has already is not sent again. May be killed, and done again.

    Every byte is hashed on its way: what differs from what was written is never uploaded.

    Args:
        log: of the tier, with the claim of this trainer, or with none to upload beside it.
    Returns:
        Its record in the log, and the number of bytes that were sent.
    Raises:
        CheckpointCorrupt: a file is not what was written.
        CheckpointIncomplete: a file is gone.
        CheckpointFenced: another trainer has claimed the tier.
        StorageError: the store does not answer, or refuses.
    """
    disk = disk or FileSystem()
    data = disk.read(checkpoint.path(MANIFEST), 2**31)
    digest = digest_of(data)
    for record in log.records():
        if record.manifest == digest:
            return record, 0
    sent_bytes = put_objects(log.store, checkpoint, disk)
    log.store.put(f"{MANIFESTS}{digest}.json", data)
    record = log.append(
        name=checkpoint.name, manifest=digest, manifest_bytes=len(data), sequence=checkpoint.sequence,
        step=checkpoint.step,
    )  # fmt: skip
    return record, sent_bytes


def put_objects(store: ObjectStore, checkpoint: Checkpoint, disk: FileSystem) -> int:
    """Upload small files concurrently, since each costs a round trip, and large ones one by one in parts.

    Returns:
        The number of bytes that were sent.
    """

    def put(entry: FileEntry) -> int:
        key = object_key(entry)
        if store.find(key) == entry.size:
            return 0
        store.put_pieces(key, lambda: checked_file(disk, checkpoint, entry), entry.size)
        return entry.size

    entries = {object_key(entry): entry for entry in checkpoint.manifest.files if entry.size}
    unsent = sorted(entries.values(), key=lambda entry: entry.size)
    num_small = sum(entry.size <= SMALL_BYTES for entry in unsent)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upload") as threads:  # an error cancels those to come
        sent_bytes = sum(threads.map(put, unsent[:num_small]))
    return sent_bytes + sum(map(put, unsent[num_small:]))


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
        complete, _ = store.survey()
        for local in [] if anew else complete:
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                if manifest_digest(store.disk, local) == record.manifest:
                    return local
        checkpoint = tier.open(record)
        known = {
            (entry.blake3, entry.size): (local, entry.path) for local in complete for entry in local.manifest.files
        }
        store.borrow_claim()  # a trainer that is saving there stays the owner
    needed = sum(entry.size for entry in checkpoint.manifest.files if (entry.blake3, entry.size) not in known)
    begun = store.begin(checkpoint.step, needed_bytes=needed, needed_files=len(checkpoint.manifest.files))
    with begun as transaction, write_errors(f"fetching {record.name}"):
        for entry in checkpoint.manifest.files:
            _fetch(tier, checkpoint, entry, transaction.directory, store.disk, known)
        write_by_rename(store.disk, transaction.directory / MANIFEST, checkpoint.data)
        write_by_rename(store.disk, transaction.directory / COMMIT, commit_line(checkpoint.data))
        with store.locked():
            fetched = transaction.rename(checkpoint.manifest, record.name)
    confirm_upload(store.disk, fetched, record.manifest, tier.store.address)
    return fetched


def _fetch(
    tier: RemoteStore,
    published: RemoteCheckpoint,
    entry: FileEntry,
    root: Path,
    disk: FileSystem,
    known: dict[tuple[str, int], tuple[Checkpoint, str]],
) -> None:
    target = root / entry.path
    make_directories(disk, target.parent, root)
    if (source := known.get((entry.blake3, entry.size))) is not None:
        checkpoint, path = source
        with contextlib.suppress(BadCheckpoint, FileNotFoundError):  # the latter: its trainer has pruned it since
            CheckpointReader(checkpoint, disk).check(path)
            if duplicate(disk, checkpoint.path(path), target):
                return
    leaves = write_file(disk, target, tier.leaves(published, entry))
    assert leaves == entry.leaves, "each was compared before it was written"


@dataclass(frozen=True, kw_only=True)
class CheckpointTier:
    """Object storage that gets a run's checkpoints beside the local disk.

    Args:
        storage: the place of this run's checkpoints alone.
        rules: which of them it gets.
    """

    storage: Storage
    rules: UploadTarget = field(default_factory=lambda: UploadTarget(address=""))

    @property
    def address(self) -> str:
        """Address for people and for `resume=`."""
        return self.storage.address

    def connect(self) -> RemoteStore:
        """Store of its checkpoints; no request is sent yet."""
        return RemoteStore(self.storage.connect())

    def refused(self, error: StorageError) -> ConfigError:
        """Error for a store that refuses or does not answer, with what to do."""
        what = "refuses" if isinstance(error, StorageRefused) else "does not answer"
        return ConfigError(
            f"storage leads to {self.address}, which {what}: {error}. Fix that, or keep checkpoints on the local "
            "disk alone with checkpoint.upload_interval=null."
        )

    def refuse_absence(self) -> None:
        """Raises:
        ConfigError: the store does not answer within a few seconds, or takes nothing.
        """
        try:
            self.storage.refuse_absence()
        except StorageError as error:
            raise self.refused(error) from error

    def cold(self) -> UploadTarget:
        """Record of the store in the directory. Publications go on from the highest number that the store has.

        A store that does not answer may have any; the clock is then above all that it can have, since numbers are
        counted from 1.

        Raises:
            ConfigError: the store refuses: there is no such bucket, or the credentials are not for it.
        """
        checkpoints = self.connect()
        try:
            floor = max((record.sequence for record in checkpoints.records()), default=0)
        except StorageRefused as error:
            raise self.refused(error) from error
        except StorageError as error:
            floor = int(time.time())
            log.error("%s does not answer (%s): publications are numbered from %d", self.address, error, floor)
        finally:
            checkpoints.store.close()
        return replace(self.rules, address=self.address, sequence_floor=floor)


def tier_of(
    settings: Checkpointing | None, storage: Storage | None, project: str, experiment: str, job: str = ""
) -> CheckpointTier | None:
    """The tier of a run: `checkpoint.cold_storage` where it is given, else `storage`; None without either.

    It is at `PREFIX/checkpoints/PROJECT/EXPERIMENT`, like checkpoints on the local disk.
    """
    if settings is None or settings.upload_interval is None:
        return None
    interval, interval_s = settings.upload_interval, settings.upload_interval_s
    if settings.cold_storage is not None:
        keys = dict(settings.cold_storage)
        interval, interval_s = keys.pop("upload_every", interval), keys.pop("upload_interval", interval_s)
        storage = storage_from(keys)
    if storage is None:
        return None
    storage = storage.below("/".join(part for part in ("checkpoints", project, experiment, job) if part))
    rules = UploadTarget(
        address=storage.address, upload_interval=interval, upload_interval_s=interval_s or 0.0,
        keep_waiting=settings.keep_waiting,
    )  # fmt: skip
    return CheckpointTier(storage=storage, rules=rules)


def bring(address: str, save_dir: Path, storage: Storage | None = None) -> tuple[Checkpoint, Storage]:
    """Fetch what an address names: a tier, of which the newest is meant, or one checkpoint of it; and the place of the
    tier.

    It is downloaded to a directory below `save_dir/fetched`, which may be deleted at any time and has the newest two
    besides.

    Args:
        storage: whose settings are taken over where it is of the same kind.
    Raises:
        CheckpointNotFound: there is none.
        BadCheckpoint: it is damaged.
    """
    tier, record = find_at(address, storage)
    digest = hashlib.blake2b(tier.store.address.encode(), digest_size=6).hexdigest()
    store = CheckpointStore(save_dir / FETCHED / digest)
    fetched = pull(tier, record or tier.newest().record, store)
    with contextlib.suppress(CheckpointError):  # another process prunes there
        prune(store, Retention(keep_last_n=FEWEST_KEPT), keep=[fetched.name])
    return fetched, storage_at(tier.store.address, storage)


def fetch_by_manifest(storage: Storage, manifest: str, directory: Path) -> Checkpoint | None:
    """Fetch the checkpoint with this manifest into a directory, once for all processes of this machine that ask at
    once; None where the store does not have it.

    Raises:
        BadCheckpoint: it is damaged.
        StorageError: the store does not answer.
    """
    tier = RemoteStore(storage.connect())
    try:
        record = next((entry for entry in reversed(tier.records()) if entry.manifest == manifest), None)
        if record is None:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            return pull(tier, record, CheckpointStore(directory))
        finally:
            os.close(fd)
    finally:
        tier.store.close()


def find_at(address: str, storage: Storage | None = None) -> tuple[RemoteStore, LogRecord | None]:
    """The tier that an address leads to, and the checkpoint that it names, or None where it names none.

    Raises:
        CheckpointNotFound: there is no tier, or no checkpoint of this name.
    """
    named = storage_at(address.rstrip("/"), storage)
    tier = RemoteStore(named.connect())
    if tier.log.records():
        return tier, None
    parent, _, name = named.address.rpartition("/")
    if "://" in parent and not parent.endswith(("/", ":")):
        above = RemoteStore(storage_at(parent, storage).connect())
        if above.log.records():
            return above, above.find(None if name == "latest" else name)
    raise CheckpointNotFound(f"{address} holds no checkpoints: a run's are at PREFIX/checkpoints/PROJECT/EXPERIMENT")
