"""The store behind a directory of checkpoints, as a run's configuration says it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from verl.checkpoint.settings import Checkpointing
from verl.checkpoint.tiers.remote import RemoteCheckpoints
from verl.checkpoint.waiting import Cold
from verl.errors import ConfigError, StorageError, StorageRefused
from verl.storage.config import Storage, storage_from

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where a run's checkpoints go beside the local disk.

    Args:
        storage: the place of this run's checkpoints alone.
        upload_interval, keep_waiting: see `Checkpointing`.
    """

    storage: Storage
    upload_interval: int = 1
    keep_waiting: int = 8

    @property
    def address(self) -> str:
        """For people, and for `resume=`."""
        return self.storage.address

    def connect(self) -> RemoteCheckpoints:
        """Its checkpoints; nothing is asked yet."""
        return RemoteCheckpoints(self.storage.connect())

    def cold(self) -> Cold:
        """What the directory is to know of it. Publications go on from the highest number that the store has.

        A store that does not answer may have any; the clock is then above all that it can have, since numbers are
        counted from 1.

        Raises:
            ConfigError: the store refuses: there is no such bucket, or the credentials are not for it.
        """
        checkpoints = self.connect()
        try:
            floor = checkpoints.highest_sequence()
        except StorageRefused as error:
            raise ConfigError(
                f"storage leads to {self.address}, which refuses: {error}. Mend that, or keep checkpoints on the local "
                "disk alone with checkpoint.upload_interval=null."
            ) from error
        except StorageError as error:
            floor = int(time.time())
            log.error("%s cannot be asked (%s): publications are numbered from %d", self.address, error, floor)
        finally:
            checkpoints.store.close()
        return Cold(
            address=self.address,
            upload_interval=self.upload_interval,
            keep_waiting=self.keep_waiting,
            sequence_floor=floor,
        )


def tier_of(
    settings: Checkpointing | None, storage: Storage | None, project: str, experiment: str, job: str = ""
) -> Tier | None:
    """The tier of a run: `checkpoint.cold_storage` where it is given, else `storage`; None without either.

    It lies at `PREFIX/checkpoints/PROJECT/EXPERIMENT`, as checkpoints do on the local disk.
    """
    if settings is None or settings.upload_interval is None:
        return None
    interval = settings.upload_interval
    if settings.cold_storage is not None:
        own = dict(settings.cold_storage)
        interval = own.pop("upload_interval", interval)
        storage = storage_from(own)
    if storage is None or storage.kind == "memory":  # what is in the memory of a process is no second place
        return None
    below = "/".join(part for part in ("checkpoints", project, experiment, job) if part)
    return Tier(storage=storage.below(below), upload_interval=interval, keep_waiting=settings.keep_waiting)
