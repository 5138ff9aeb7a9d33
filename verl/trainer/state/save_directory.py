"""Directories of a run: whether it may save in its own, what it resumes from, and whose run directory it is.

A checkpoint belongs to the training with its identity (`verl.trainer.state.training_identity`), and a directory to one
training:

no resume       the directory if the newest checkpoint there is of this training, or if there is none; else refused
resume=latest   the newest checkpoint of this training in the directory or in the store; refused if all are of others
resume=PATH     that checkpoint; the run saves in its own directory, as without resume

A directory that is locked by a running run is refused, and so is a location in object storage that is leased by a run
on another machine; the error names the owner. A run directory is refused if another run has trained there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.ownership import (
    LEASE_S,
    RENEW_EVERY_S,
    CheckpointInUse,
    Owner,
    RunLock,
    StoreLease,
    living_holder,
    lock_run_directory,
)
from verl.checkpoint.read.discovery import LATEST, OWN_DIRECTORIES, CheckpointDirectory
from verl.checkpoint.remote.transfer import CheckpointTier, tier_of
from verl.checkpoint.resolve import ResumePoint, RunCheckpoints, resolve
from verl.checkpoint.retention import recorded_ancestors
from verl.errors import CheckpointNotFound, ConfigError, StorageError, StorageRefused
from verl.storage.config import Storage
from verl.tracking.console import shown_path
from verl.tracking.jsonl import json_lines, json_object
from verl.trainer.config import LoopSettings
from verl.trainer.state.training_identity import identity_differences, refuse_other_identity
from verl.utils.directories import unwritable

_log = logging.getLogger(__name__)

MOST_KEYS = 3  # that differ, in a sentence
WATCH_S = RENEW_EVERY_S + 2  # in which a living run of another machine renews its lease
LONGEST_NAME = 120  # characters of the directory of a sweep's job
OTHER_DIRECTORY = "give this run another directory: trainer.experiment_name=NAME, or checkpoint.save_dir=DIR"


@dataclass
class SaveDirectory:
    """Save directory of a run.

    Attributes:
        resumed: the checkpoint that it resumes from, or None.
        lock: the lock that is held; None if nothing is saved.
        lease: the lease in object storage; None without storage, or if it did not answer.
        in_use: keeps a checkpoint of another directory that it resumes from.
        run_dir_lock: of the run directory; None if the command holds it.
    """

    directory: Path
    tier: CheckpointTier | None
    resumed: ResumePoint | None = None
    lock: RunLock | None = None
    lease: StoreLease | None = None
    in_use: CheckpointInUse | None = None
    run_dir_lock: RunLock | None = None

    def release(self) -> None:
        """Idempotent."""
        for held in (self.in_use, self.lease, self.lock, self.run_dir_lock):
            if held is not None:
                held.release()


class SaveDirectoryChoice:
    """Decides whether one run may save in its directory, and which checkpoint it resumes from.

    Args:
        settings: None: nothing is saved.
        job: name of a sweep's job, see `job_name`; empty for a run outside of a sweep.
        identity: of the training, or a function that computes it when it is needed.
        unknown: keys of the identity that are not known yet and are not compared.
    """

    def __init__(
        self,
        settings: Checkpointing | None,
        trainer: LoopSettings,
        job: str,
        storage: Storage | None,
        identity: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        run_id: str,
        unknown: Collection[str] = (),
    ):
        self._saves, self._settings, self._storage = settings is not None, settings or Checkpointing(), storage
        self.directory = self._settings.directory(trainer.project_name, trainer.experiment_name, job)
        self._tier = tier_of(settings, storage, trainer.project_name, trainer.experiment_name, job)
        self._quick = self._tier  # with at most one retry per request
        if self._tier is not None:
            storage = replace(self._tier.storage, retries=min(1, self._tier.storage.retries))
            self._quick = replace(self._tier, storage=storage)
        self._whole_identity, self._run_id, self._unknown = identity, run_id, frozenset(unknown)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        whole = self._whole_identity
        return self._known(whole() if callable(whole) else whole)

    def choose(
        self,
        resume: str | None,
        run_dir: Path | None = None,
        *,
        is_restart: bool = False,
        dry: bool = False,
        uses_storage: bool = False,
    ) -> SaveDirectory:
        """Lock the directory to save in, resolve `resume`, and lock the run directory.

        In this order: a run that is ending there still saves and prunes. A run of this process keeps its lock until
        this one is known to be allowed.

        Args:
            is_restart: this trainer has trained in its run directory before.
            dry: only raise the errors that can be found within seconds; nothing is locked, downloaded or verified.
            uses_storage: the storage holds something other than checkpoints too.
        Raises:
            ConfigError: there is no such checkpoint, or it is of another training, or a directory is another
                training's or a running run's; in a dry run also: it cannot be written, or the store does not answer.
            BadCheckpoint: the checkpoint is damaged.
            CheckpointWriteFailed: the directory cannot be written.
        """
        if dry:
            self._refuse_unusable(resume, uses_storage)
        chosen, is_later = SaveDirectory(self.directory, self._tier), RunLock.held_here(self.directory) is not None
        with contextlib.ExitStack() as undo:
            undo.callback(chosen.release)
            if self._saves and not (dry or is_later):
                self._lock(chosen)
                self._lease(chosen)
            chosen.resumed = self._resolve(resume, chosen, dry)
            if self._saves and dry:
                self._refuse_holder()
            if run_dir is not None:
                chosen.run_dir_lock = None if dry else lock_run_directory(run_dir)
                if not is_restart and (faults := [*run_dir_faults(run_dir, resume, chosen.resumed, self.directory)]):
                    raise ConfigError(faults)
            if self._saves and is_later and not dry:
                self._lease(chosen)  # first: a refusal must leave the earlier run its lock
                self._lock(chosen)
            undo.pop_all()
        return chosen

    # -- the checkpoint to resume from --------------------------------------------------------------------------------

    def _resolve(self, resume: str | None, chosen: SaveDirectory, dry: bool) -> ResumePoint | None:
        settings, point = self._settings, None
        if resume is not None:
            tier = self._quick if dry else self._tier
            point = resolve(
                resume, self.directory, strict=settings.strict, verify=settings.verify, tier=tier,
                storage=self._storage, is_own=self._is_own, dry=dry,
            )  # fmt: skip
            if point is not None:
                self._refuse_other(resume, point)
            elif not dry:
                where = f"{self.directory} or {self._tier.address}" if self._tier is not None else self.directory
                _log.warning("resume=latest found no checkpoint in %s: starting from the beginning.", where)
        is_inside = point is not None and point.checkpoint.directory.parent == self.directory
        if point is not None and not dry and not (self._saves and is_inside):
            chosen.in_use = CheckpointInUse(point.checkpoint)
        if self._saves and resume != LATEST and not is_inside:
            does_not_answer = chosen.lock is not None and chosen.lease is None
            self._refuse_owner(None if does_not_answer else self._quick)
        return point

    # -- whose directory it is ----------------------------------------------------------------------------------------

    def _known(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in identity.items() if path not in self._unknown}

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        return not identity_differences(self._known(state.get("identity", {})), self._identity)

    def _refuse_other(self, resume: str, point: ResumePoint) -> None:
        known = {**point.state, "identity": self._known(point.state.get("identity", {}))}
        try:
            refuse_other_identity(replace(point, state=known), self._identity)
        except ConfigError as error:
            if resume != LATEST:
                raise
            where = point.checkpoint.directory.parent
            fault = (
                f"resume is 'latest': {where} holds no checkpoint of this training. Set back what differs to go on "
                f"with the training there, or {OTHER_DIRECTORY}."
            )
            raise ConfigError([*error.faults, fault]) from error

    def _refuse_owner(self, tier: CheckpointTier | None) -> None:
        """Refuse a run that does not resume from the directory's own, if the newest there is another training's."""
        try:
            newest = resolve(LATEST, self.directory, tier=tier, dry=True)
        except ConfigError:  # all are damaged, or the store does not answer
            return
        if newest is None or self._is_own(newest.state):
            return
        where, key = newest.checkpoint.directory.parent, "checkpoint.save_dir"
        if where != self.directory and tier is not None:
            where, key = tier.address, "storage"
        raise ConfigError(
            f"{key} leads to {where}: it holds checkpoints of another training "
            f"({self._differing(newest.state.get('identity', {}))}). Go on with that one by resume=latest and its "
            f"settings, or {OTHER_DIRECTORY}."
        )

    def _differing(self, identity: Mapping[str, Any]) -> str:
        """The keys in which another training differs."""
        if not identity:
            return "its identity is unknown"
        keys = list(identity_differences(self._known(identity), self._identity))
        more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
        return f"different {', '.join(keys[:MOST_KEYS])}{more}" if keys else ""

    # -- who saves there now ------------------------------------------------------------------------------------------

    def _refuse_unusable(self, resume: str | None, uses_storage: bool) -> None:
        places = [self.directory, *(self.directory / name for name in OWN_DIRECTORIES)] if self._saves else []
        if (fault := next(filter(None, map(unwritable, places)), None)) is not None:
            raise ConfigError(
                f"checkpoint.save_dir leads to {self.directory}: {fault}. Set checkpoint.save_dir=DIR to one that can "
                "be written, or checkpoint=off."
            )
        storage = self._storage if uses_storage else None
        tier = self._tier or (CheckpointTier(storage=storage) if storage is not None else None)
        if tier is not None and not (resume == LATEST and CheckpointDirectory(self.directory).candidates()):
            tier.refuse_absence()  # local checkpoints are usable without it

    def _refuse_holder(self) -> None:
        """Refuse to begin beside a running run; takes no lock."""
        if (holder := RunLock.holder_of(self.directory)) is not None:
            raise self._busy(holder)
        with contextlib.suppress(StorageError):  # reported elsewhere, or the run resumes from disk without the store
            if self._tier is not None and (holder := living_holder(self._tier.storage.hasty, WATCH_S)) is not None:
                raise self._busy(holder)

    def _lock(self, chosen: SaveDirectory) -> None:
        lock = RunLock(self.directory, Owner.here(self._run_id, self._identity))
        if (holder := lock.acquire()) is not None:
            raise self._busy(holder)
        chosen.lock = lock

    def _lease(self, chosen: SaveDirectory) -> None:
        """Lease the place in object storage, if there is one that answers."""
        if self._quick is None:
            return
        lease = StoreLease(self._quick.storage, Owner.here(self._run_id, self._identity))
        try:
            if (holder := lease.acquire()) is not None:
                raise self._busy(holder)
        except StorageRefused as error:
            raise self._quick.refused(error) from error
        except StorageError as error:
            _log.error(
                "%s cannot be read, so another run may be uploading there (%s): if so, the later one continues",
                self._quick.address, error,
            )  # fmt: skip
            return
        lease.keep()
        chosen.lease = lease

    def _busy(self, holder: Owner) -> ConfigError:
        differing = self._differing(holder.identity)
        what = f"another training ({differing})" if differing else "this training"
        if holder.renewed_at and self._tier is not None:
            return ConfigError(
                f"storage leads to {self._tier.address}: a run of {what} is uploading there ({holder}). Wait for its "
                f"end, stop it (if it was killed, its lease expires after {LEASE_S:.0f} s), or give this "
                "run another location: trainer.experiment_name=NAME, or storage.prefix=PREFIX."
            )
        return ConfigError(
            f"checkpoint.save_dir leads to {self.directory}: a run of {what} is saving there ({holder}). Wait for "
            f"its end, stop it, or {OTHER_DIRECTORY}."
        )


def job_name(job: str, swept: Sequence[str]) -> str:
    """Directory name of a sweep's job: its swept overrides, so that a sweep that is started again finds the
    checkpoints of each job whatever its number. Empty outside of a sweep.

    >>> job_name("job_3", ["trainer.seed=1", "algorithm=grpo"])
    'algorithm=grpo,trainer.seed=1'

    Args:
        job: its number in the sweep, such as "job_3"; the name where the overrides are unknown.
    """
    text = ",".join(sorted(override.lstrip("+") for override in swept)) or job
    name = re.sub(r"[^\w.=,-]", "_", text)
    if name == text and len(text) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{blake2b(text.encode(), digest_size=4).hexdigest()}"


def ancestors_of(point: ResumePoint | None) -> dict[str, int]:
    """The runs that a run which goes on from a checkpoint descends from, each with the number of the last publication
    of it that belongs to this descent."""
    if point is None:
        return {}
    manifest = point.checkpoint.manifest
    return {**(recorded_ancestors(point.state) or {}), manifest.run_id: manifest.sequence}


def run_dir_faults(run_dir: Path, resume: str | None, point: ResumePoint | None, save_dir: Path) -> Iterator[str]:
    """Fault of a run directory with training steps of another run, which this one does not resume.

    A run that ended before its first step owns nothing. A run that resumes may write where it, its ancestors, or an
    earlier start of it wrote; with `resume=latest` and no checkpoint yet, where a run with the same save directory did.

    Args:
        resume: the setting of this run.
        point: the checkpoint that it resumes from, or None.
        save_dir: where this run saves.
    """
    summary, metrics = run_dir / "summary.json", run_dir / "metrics.jsonl"
    if summary.is_file() and _number(json_object(summary), "steps"):
        trained = f"{json_object(summary)['steps']} steps in {summary.name}"
    elif metrics.is_file() and (step := next(filter(None, (_number(x, "step") for x in json_lines(metrics))), 0)):
        trained = f"step {step} in {metrics.name}"
    else:
        return
    if resume is not None and _is_resumed(run_dir, resume, point, save_dir):
        return
    yield (
        f"hydra.run.dir is {shown_path(run_dir)}: another run has trained there ({trained}), and the metrics, "
        "configuration and weights of two runs would mix. Give this run a directory of its own (hydra.run.dir=DIR; in "
        "Python, run_dir), or continue the run that wrote there with resume=latest."
    )


def _number(record: Mapping[str, Any], key: str) -> int:
    return number if isinstance(number := record.get(key), int) else 0


def _is_resumed(run_dir: Path, resume: str, point: ResumePoint | None, save_dir: Path) -> bool:
    try:
        written = RunCheckpoints.of(run_dir)
    except CheckpointNotFound:
        return False
    if written is None:
        return False
    if point is None:
        same = (os.path.realpath(place) == os.path.realpath(save_dir) for place in written.places(run_dir))
        return resume == LATEST and any(same)
    return not written.lineage.keys().isdisjoint(ancestors_of(point))
