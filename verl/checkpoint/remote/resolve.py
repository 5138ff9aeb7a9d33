"""The remote tier of a run, and checkpoints that an address or a digest names, brought to the local disk."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import UploadTarget
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.discovery import FETCHED
from verl.checkpoint.remote.commit_log import LOG, LogRecord
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.checkpoint.remote.transfer import pull
from verl.errors import CheckpointNotFound, ConfigError, StorageError, StorageRefused
from verl.storage.config import Storage, storage_at, storage_from

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointTier:
    """Object storage that gets a run's checkpoints beside the local disk.

    Args:
        storage: the place of this run's checkpoints alone.
        upload_interval, upload_interval_s, keep_waiting: see `Checkpointing`.
    """

    storage: Storage
    upload_interval: int = 1
    upload_interval_s: float | None = None
    keep_waiting: int = 8

    @property
    def address(self) -> str:
        """Address for people and for `resume=`."""
        return self.storage.address

    def connect(self) -> RemoteStore:
        """Store of its checkpoints; no request is sent yet."""
        return RemoteStore(self.storage.connect())

    def refused(self, error: StorageRefused) -> ConfigError:
        """Error for a request that the store refuses, with what to do."""
        return ConfigError(
            f"storage leads to {self.address}, which refuses: {error}. Fix that, or keep checkpoints on the local "
            "disk alone with checkpoint.upload_interval=null."
        )

    def refuse_absence(self) -> None:
        """Raises:
        ConfigError: the store does not answer within a few seconds, or takes nothing.
        """
        try:
            self.storage.refuse_absence()
        except StorageRefused as error:
            raise self.refused(error) from error
        except StorageError as error:
            raise ConfigError(
                f"storage leads to {self.address}, which does not answer: {error}. Fix that, or keep checkpoints on "
                "the local disk alone with checkpoint.upload_interval=null."
            ) from error

    def cold(self) -> UploadTarget:
        """Record of the store in the directory. Publications go on from the highest number that the store has.

        A store that does not answer may have any; the clock is then above all that it can have, since numbers are
        counted from 1.

        Raises:
            ConfigError: the store refuses: there is no such bucket, or the credentials are not for it.
        """
        checkpoints = self.connect()
        try:
            floor = checkpoints.highest_sequence()
        except StorageRefused as error:
            raise self.refused(error) from error
        except StorageError as error:
            floor = int(time.time())
            log.error("%s does not answer (%s): publications are numbered from %d", self.address, error, floor)
        finally:
            checkpoints.store.close()
        return UploadTarget(
            address=self.address,
            upload_interval=self.upload_interval,
            upload_interval_s=self.upload_interval_s or 0.0,
            keep_waiting=self.keep_waiting,
            sequence_floor=floor,
        )


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
    below = "/".join(part for part in ("checkpoints", project, experiment, job) if part)
    return CheckpointTier(
        storage=storage.below(below),
        upload_interval=interval,
        upload_interval_s=interval_s,
        keep_waiting=settings.keep_waiting,
    )


def bring(address: str, save_dir: Path, storage: Storage | None = None) -> tuple[Checkpoint, Storage]:
    """Fetch what an address names: a tier, of which the newest is meant, or one checkpoint of it; and the place of the
    tier.

    It is downloaded to a directory below `save_dir/fetched`, which may be deleted at any time.

    Args:
        storage: whose settings are taken over where it is of the same kind.
    Raises:
        CheckpointNotFound: there is none.
        BadCheckpoint: it is damaged.
    """
    tier, record = find_at(address, storage)
    digest = hashlib.blake2b(tier.store.address.encode(), digest_size=6).hexdigest()
    fetched = pull(tier, record or tier.newest().record, CheckpointStore(save_dir / FETCHED / digest))
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

    An address above exactly one tier leads to that.

    Raises:
        CheckpointNotFound: there is no tier, or no checkpoint of this name, or there are several tiers below.
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
    suffix = f"/{LOG}000000000001.json"
    below = [stored.key.removesuffix(suffix) for stored in tier.store.list() if stored.key.endswith(suffix)]
    if len(below) == 1:
        return RemoteStore(named.below(below[0]).connect()), None
    reason = (
        f"did you mean {' or '.join(f'{named.address}/{prefix}' for prefix in below[:3])}?"
        if below
        else "nothing is there"
    )
    raise CheckpointNotFound(f"{address} holds no checkpoints: {reason}")
