"""The remote tier of a run, the newest complete checkpoint of any tier brought to the local disk, and addresses."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import UploadTarget, manifest_digest
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.read.discovery import FETCHED, CheckpointDirectory
from verl.checkpoint.read.verify import Level, open_verified
from verl.checkpoint.remote.commit_log import LOG, LogRecord
from verl.checkpoint.remote.download import pull
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.errors import (
    BadCheckpoint,
    CheckpointNotFound,
    CheckpointUnsupported,
    ConfigError,
    StorageError,
    StorageRefused,
)
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
        own = dict(settings.cold_storage)
        interval, interval_s = own.pop("upload_every", interval), own.pop("upload_interval", interval_s)
        storage = storage_from(own)
    if storage is None or storage.kind == "memory":  # what is in the memory of a process is no second place
        return None
    below = "/".join(part for part in ("checkpoints", project, experiment, job) if part)
    return CheckpointTier(
        storage=storage.below(below),
        upload_interval=interval,
        upload_interval_s=interval_s,
        keep_waiting=settings.keep_waiting,
    )


def newest_of_tiers(
    directory: Path,
    tier: CheckpointTier,
    level: Level,
    strict: bool = False,
    is_own: Callable[[Mapping[str, Any]], bool] | None = None,
) -> tuple[Checkpoint, dict[str, Any]]:
    """The newest checkpoint that is whole, on the local disk or in the store, and its `trainer_state.json`; from the
    store it is fetched.

    A damaged one is named, and its copy in the other tier is taken, or the one before it; so is one whose objects the
    store does not give.

    Args:
        is_own: whether a checkpoint is of this training, by its state. Where all are of others their newest is
            returned, for the caller to refuse; it is not fetched. None: any training.
    Raises:
        CheckpointNotFound: neither has one.
        ConfigError: the store does not answer and the local disk has none, or all are damaged.
        BadCheckpoint: with `strict`, the first that is damaged.
    """
    local = CheckpointDirectory(directory)
    complete, bad = local.survey()
    remote, records = tier.connect(), []
    faults: list[BadCheckpoint | StorageError] = [*bad]
    try:
        records = remote.records()
    except StorageError as error:
        if not complete:
            raise ConfigError(
                f"resume is 'latest': there is no checkpoint in {directory}, and {tier.address} cannot be "
                f"read ({error}). Fix that, or start without resume."
            ) from error
        log.error(
            "%s does not answer (%s), so a newer checkpoint there is not found: resuming from the local disk",
            tier.address,
            error,
        )
    other: tuple[Checkpoint, dict[str, Any]] | None = None
    try:
        for found in _in_order(local, complete, records):
            try:
                if is_own is not None:
                    seen = _seen(local, remote, found)
                    if not is_own(seen[1]):
                        other = other or seen
                        continue
                if isinstance(found, Checkpoint):
                    checkpoint = open_verified(local.disk, found.directory, level)
                else:
                    checkpoint = pull(remote, found, CheckpointStore(directory), anew=True)
                return checkpoint, read_state(local.disk, checkpoint)
            except CheckpointUnsupported:
                raise
            except BadCheckpoint as error:
                log.error("NOT USING checkpoint %s", error)
                faults.append(error)
            except StorageError as error:
                name = found.name or "a checkpoint"
                log.error("NOT USING checkpoint %s of %s, which cannot be fetched: %s", name, tier.address, error)
                faults.append(error)
            if strict:
                raise faults[-1]
    finally:
        remote.store.close()
    if other is not None:
        return other
    if faults:
        raise ConfigError(
            f"resume finds damaged checkpoints in {directory} and {tier.address}, or such as cannot be fetched, and no "
            f"whole one (the last: {faults[-1]}). Repair or remove them, or start without resume."
        )
    raise CheckpointNotFound(f"neither {directory} nor {tier.address} holds a checkpoint")


def _seen(
    local: CheckpointDirectory, remote: RemoteStore, found: Checkpoint | LogRecord
) -> tuple[Checkpoint, dict[str, Any]]:
    """A checkpoint with its location and its `trainer_state.json`."""
    if isinstance(found, Checkpoint):
        return found, read_state(local.disk, found)
    checkpoint = remote.open(found)
    return checkpoint, remote.state(checkpoint)


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
    place = hashlib.blake2b(tier.store.address.encode(), digest_size=6).hexdigest()
    fetched = pull(tier, record or tier.newest().record, CheckpointStore(save_dir / FETCHED / place))
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
        record = next((one for one in reversed(tier.records()) if one.manifest == manifest), None)
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
    below = [found.key.removesuffix(suffix) for found in tier.store.list() if found.key.endswith(suffix)]
    if len(below) == 1:
        return RemoteStore(named.below(below[0]).connect()), None
    reason = (
        f"did you mean {' or '.join(f'{named.address}/{one}' for one in below[:3])}?" if below else "nothing is there"
    )
    raise CheckpointNotFound(f"{address} holds no checkpoints: {reason}")


def _in_order(
    local: CheckpointDirectory, complete: list[Checkpoint], records: list[LogRecord]
) -> Iterator[Checkpoint | LogRecord]:
    """Checkpoints, newest first; for one in both tiers the local copy."""
    of_local = [((one.sequence, 1, manifest_digest(local.disk, one)), one) for one in complete]
    of_store = [((record.sequence, 0, record.manifest), record) for record in records]
    for _, found in sorted([*of_local, *of_store], key=lambda pair: pair[0], reverse=True):
        yield found
