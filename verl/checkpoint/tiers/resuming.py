"""The newest complete checkpoint of any tier, brought to the local disk; and what an address means."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

from verl.checkpoint.discovery import FETCHED, CheckpointDirectory
from verl.checkpoint.published import Published
from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.tiers.log import LOG, Record
from verl.checkpoint.tiers.pull import pull
from verl.checkpoint.tiers.remote import RemoteCheckpoints
from verl.checkpoint.tiers.tier import Tier
from verl.checkpoint.verify import Level, verified
from verl.checkpoint.waiting import manifest_digest
from verl.errors import BadCheckpoint, CheckpointNotFound, CheckpointTooNew, ConfigError, StorageError
from verl.storage.config import Storage, storage_at

log = logging.getLogger(__name__)


def newest_of_tiers(directory: Path, tier: Tier, level: Level, strict: bool = False) -> Published:
    """The newest checkpoint that is whole, on the local disk or in the store; from there it is fetched.

    A damaged one is told, and its copy in the other tier is taken, or the one before it.

    Raises:
        CheckpointNotFound: neither has one.
        ConfigError: the store does not answer and the local disk has none, or all are damaged.
        BadCheckpoint: with `strict`, the first that is damaged.
    """
    local = CheckpointDirectory(directory)
    complete, bad = local.survey()
    remote, records = tier.connect(), []
    try:
        records = remote.records()
    except StorageError as error:
        if not complete:
            raise ConfigError(
                f"resume is 'latest': there is no checkpoint in {directory}, and {tier.address} cannot be asked "
                f"whether it has one ({error}). Mend that, or start without resume."
            ) from error
        log.error("%s cannot be asked for a newer checkpoint (%s): going on from the local disk", tier.address, error)
    faults: list[BadCheckpoint] = [*bad]
    for found in _in_order(local, complete, records):
        try:
            if isinstance(found, Published):
                return verified(local.disk, found.directory, level)
            return pull(remote, found, CheckpointStore(directory), anew=True)
        except CheckpointTooNew:
            raise
        except BadCheckpoint as error:
            log.error("NOT USING checkpoint %s", error)
            faults.append(error)
        if strict:
            raise faults[-1]
    if faults:
        raise ConfigError(
            f"resume finds damaged checkpoints in {directory} and {tier.address} and no whole one; the log names what "
            "is wrong. Mend or remove them, or start without resume."
        )
    raise CheckpointNotFound(f"neither {directory} nor {tier.address} holds a checkpoint")


def bring(address: str, save_dir: Path, storage: Storage | None = None) -> Published:
    """Fetch what an address names: a tier, of which the newest is meant, or one checkpoint of it.

    It is fetched into a directory of its own below `save_dir/fetched`, which may be removed at any time.

    Args:
        storage: whose settings are taken over where it is of the same kind.
    Raises:
        CheckpointNotFound: there is none.
        BadCheckpoint: it is damaged.
    """
    tier, record = find_at(address, storage)
    place = hashlib.blake2b(tier.store.address.encode(), digest_size=6).hexdigest()
    return pull(tier, record or tier.newest().record, CheckpointStore(save_dir / FETCHED / place))


def find_at(address: str, storage: Storage | None = None) -> tuple[RemoteCheckpoints, Record | None]:
    """The tier that an address leads to, and the checkpoint that it names, or None where it names none.

    An address above exactly one tier leads to that.

    Raises:
        CheckpointNotFound: there is no tier, or no checkpoint of this name, or there are several tiers below.
    """
    named = storage_at(address.rstrip("/"), storage)
    tier = RemoteCheckpoints(named.connect())
    if tier.log.records():
        return tier, None
    parent, _, name = named.address.rpartition("/")
    if "://" in parent and not parent.endswith(("/", ":")):
        above = RemoteCheckpoints(storage_at(parent, storage).connect())
        if above.log.records():
            return above, above.find(None if name == "latest" else name)
    suffix = f"/{LOG}000000000001.json"
    below = [found.key.removesuffix(suffix) for found in tier.store.list() if found.key.endswith(suffix)]
    if len(below) == 1:
        return RemoteCheckpoints(named.below(below[0]).connect()), None
    said = (
        f"did you mean {' or '.join(f'{named.address}/{one}' for one in below[:3])}?" if below else "nothing is there"
    )
    raise CheckpointNotFound(f"{address} holds no checkpoints: {said}")


def _in_order(
    local: CheckpointDirectory, complete: list[Published], records: list[Record]
) -> Iterator[Published | Record]:
    """The newest first; of a checkpoint that lies in both tiers, the local copy."""
    of_local = [((one.sequence, 1, manifest_digest(local.disk, one)), one) for one in complete]
    of_store = [((record.sequence, 0, record.manifest), record) for record in records]
    for _, found in sorted([*of_local, *of_store], key=lambda pair: pair[0], reverse=True):
        yield found
