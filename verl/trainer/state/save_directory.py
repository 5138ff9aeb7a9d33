"""Save directory: where a run saves, which training owns existing checkpoints there, and which one `resume=latest`
means.

no resume          the first of DIR, DIR-2, DIR-3, ... that holds no other training's checkpoints, nor a living run
resume=latest      the first of them that holds checkpoints of this training; refused where all are of others; of a job
                   of a sweep, the first of all jobs' directories that holds those of a job with the same overrides
resume=PATH        where that checkpoint lies, if it is one of them, else as without resume
checkpoint.save_dir=DIR   DIR, or a refusal

A checkpoint belongs to the training with its identity (`verl.trainer.state.training_identity`). A directory that is
locked by a running run is refused, and so is a location in object storage that is leased by a run on another machine;
the error names the holder.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.checkpoint.commit.fencing import LockHolder, RunLock
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import LATEST, CheckpointDirectory
from verl.checkpoint.remote.lease import LEASE_S, RENEW_EVERY_S, LeaseRecord, StoreLease, living_holder
from verl.checkpoint.remote.resolve import CheckpointTier, find_at, tier_of
from verl.checkpoint.resume_point import ResumePoint, find
from verl.errors import BadCheckpoint, CheckpointNotFound, ConfigError, StorageError, StorageRefused
from verl.storage.config import Storage, is_address, storage_at
from verl.trainer.config import LoopSettings
from verl.trainer.state.resume import OF_THIS_START, refuse_other_identity
from verl.trainer.state.training_identity import differences
from verl.utils.temporary_directory import unwritable

_log = logging.getLogger(__name__)

MOST_KEYS = 3  # that differ, in a sentence
WATCH_S = RENEW_EVERY_S + 2  # in which a living run of another machine renews its lease


@dataclass(frozen=True)
class SavePlace:
    """One directory that a run may save in.

    Attributes:
        tier: the object storage behind it, or None.
        number: 1 for the configured directory; otherwise the suffix.
    """

    directory: Path
    tier: CheckpointTier | None
    number: int


@dataclass
class SaveDirectory:
    """Where a run saves.

    Attributes:
        resumed: the checkpoint that it resumes from, or None.
        lock: the lock that is held; None if nothing is saved.
        lease: the lease in object storage; None without storage, or if it did not answer.
        messages: information about the choice for the user, one sentence each.
    """

    directory: Path
    tier: CheckpointTier | None
    resumed: ResumePoint | None = None
    lock: RunLock | None = None
    lease: StoreLease | None = None
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep, identified by the values that the sweep varies, not by its number.

    Attributes:
        name: such as `job_0`; empty for a run outside of a sweep.
        swept: configuration paths in which the jobs differ; empty if unknown.
        config: of this job, without secrets.
    """

    name: str = ""
    swept: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def wrote(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint belongs to this job, by the values that the sweep varies."""
        if not self.name:
            return True
        found = [path for path in differences(state.get("config", {}), self.config) if path not in OF_THIS_START]
        if not self.swept or any(_at(self.config, path) is _ABSENT for path in self.swept):
            return not found  # of a chosen experiment file, which may set anything
        return not any(path == swept or path.startswith(f"{swept}.") for path in found for swept in self.swept)

    def __str__(self) -> str:
        return ", ".join(f"{path}={_at(self.config, path)}" for path in self.swept) or "its configuration"


class SaveDirectoryChoice:
    """Chooses the save directory of one run.

    Args:
        settings: None: nothing is saved.
        job: of a sweep, or none.
        identity: of the training, or a function that computes it when it is needed.
        unknown: keys of it that are not known yet and are not compared.
    """

    def __init__(
        self,
        settings: Checkpointing | None,
        trainer: LoopSettings,
        job: SweepJob,
        storage: Storage | None,
        identity: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        run_id: str,
        unknown: Collection[str] = (),
    ):
        self._unknown = frozenset(unknown)
        self._saves, self._settings = settings is not None, settings or Checkpointing()
        self._given, self._trainer, self._job, self._storage = settings, trainer, job.name, storage
        self._sweep_job = job
        self._whole_identity, self._run_id = identity, run_id
        self._is_fixed = self._settings.save_dir is not None and not job.name

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        given = self._whole_identity
        return self._known(given() if callable(given) else given)

    @property
    def first_directory(self) -> Path:
        """Where a run saves that finds no other training there."""
        return self._place(1).directory

    def choose(self, resume: str | None) -> SaveDirectory:
        """Resolve `resume`, and lock the directory to save in.

        Raises:
            ConfigError: there is no such checkpoint, or it is of another training, or the directory is another run's.
            BadCheckpoint: it is damaged.
            CheckpointWriteFailed: the directory cannot be written.
        """
        if resume == LATEST:
            return self._go_on_in_sweep() if self._job else self._go_on()
        if resume is None:
            return self._fresh()
        first = self._place(1)
        used = self._settings
        point = find(resume, first.directory, used.strict, used.verify, first.tier, self._storage, self._is_own)
        assert point is not None, "only `latest` may find none"
        refuse_other_identity(point, self._identity)
        own = point.published.directory.parent
        if (place := next((place for place in self._existing() if place.directory == own), None)) is not None:
            return self._held(place, point)
        return replace(self._fresh(), resumed=point)

    def look(self, resume: str | None, uses_storage: bool = False) -> ResumePoint | None:
        """Raise the errors of `choose` that can be found within seconds, without locking or downloading anything.

        Args:
            uses_storage: the storage holds something other than checkpoints too.
        Returns:
            The checkpoint to resume from; None if there is none, or none is known yet.
        Raises:
            ConfigError: as in `choose`; or the directory cannot be written, or the store does not answer.
        """
        first = self._place(1)
        if self._saves and (fault := unwritable(first.directory)) is not None:
            raise ConfigError(
                f"checkpoint.save_dir leads to {first.directory}: {fault}. Set checkpoint.save_dir=DIR to one that can "
                "be written, or checkpoint=off."
            )
        storage = self._storage if uses_storage and self._storage and self._storage.kind != "memory" else None
        tier = first.tier or (CheckpointTier(storage=storage) if storage is not None else None)
        if tier is not None and not (resume == LATEST and CheckpointDirectory(first.directory).candidates()):
            tier.refuse_absence()  # local checkpoints are usable without it
        if resume == LATEST:
            return self._look_for_latest_in_sweep() if self._job else self._look_for_latest()
        if resume is not None:
            return self._look_at(resume, first.directory)
        self._look_for_fresh()
        return None

    def _look_for_latest(self) -> ResumePoint | None:
        other = None
        for place in self._existing():
            is_own = self._is_own if place.number == 1 else self._is_own_by_name
            for point in _points_of(place):
                if is_own(point.state):
                    self._refuse_held(place)
                    return point
                other = other or (point if place.number == 1 else None)
        if other is not None:
            self._refuse(other)
        self._refuse_held(self._place(1))
        return None

    def _look_for_latest_in_sweep(self) -> ResumePoint | None:
        other = None
        for place in self._jobs():
            for point in _points_of(place):
                if self._is_own(point.state):
                    self._refuse_held(place)
                    return point
                other = other or (point if self._sweep_job.wrote(point.state) else None)
        if other is not None:
            self._refuse(other)
        self._look_for_fresh()
        return None

    def _look_for_fresh(self) -> None:
        """Refuse where the directory that this run would take, or its place in the store, is held by a run of the same
        training, or is the only one that it may take and is taken. Whose checkpoints lie there is asked where a run
        lives alone: to tell it costs a digest of the data."""
        if not self._saves:
            return
        if self._is_fixed and (taken := self._taken(self._place(1))) is not None:
            raise self._not_its_own(taken)
        held = {place.number: holder for place in self._existing() if (holder := self._holder(place)) is not None}
        for place in self._numbered() if held else ():
            if self._taken(place) is None:
                if (holder := held.get(place.number)) is None:
                    return
                if self._is_fixed or not self._differing(holder.identity):
                    raise self._busy(place, holder)

    def _refuse_held(self, place: SavePlace) -> None:
        if self._saves and (holder := self._holder(place)) is not None:
            raise self._busy(place, holder)

    def _holder(self, place: SavePlace) -> LockHolder | None:
        """The running run that holds a directory or its location in the store; does not lock anything."""
        if (holder := RunLock.look(place.directory)) is not None or place.tier is None:
            return holder
        try:
            return living_holder(place.tier.storage.hasty, WATCH_S)
        except StorageError:  # reported elsewhere, or the run resumes from disk without the store
            return None

    def _look_at(self, resume: str, directory: Path) -> ResumePoint:
        if is_address(resume):
            try:
                storage_at(resume.rstrip("/"), self._storage).hasty.connect().list("preflight/")
                remote, record = find_at(resume, self._storage)
                published = remote.open(record) if record is not None else remote.newest()
                point = ResumePoint(published, remote.state(published), "looked at")
            except (CheckpointNotFound, StorageError) as error:
                raise ConfigError(f"resume is {resume!r}: {error}") from error
        else:
            point = find(resume, directory, self._settings.strict, verify=False, is_own=self._is_own)
            assert point is not None, "only `latest` may find none"
        known = {**point.state, "identity": self._known(point.state.get("identity", {}))}
        refuse_other_identity(replace(point, state=known), self._identity)
        own = point.published.directory.parent
        if (place := next((place for place in self._existing() if place.directory == own), None)) is not None:
            self._refuse_held(place)
        else:
            self._look_for_fresh()
        return point

    def _known(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in identity.items() if path not in self._unknown}

    # -- which directory ------------------------------------------------------------------------------------------

    def _go_on(self) -> SaveDirectory:
        used, other = self._settings, None
        for place in self._existing():
            is_own = self._is_own if place.number == 1 else self._is_own_by_name
            point = find(LATEST, place.directory, used.strict, used.verify, place.tier, is_own=is_own)
            if point is not None and is_own(point.state):
                return self._held(place, point)
            other = point if place.number == 1 else other
        if other is not None:
            self._refuse(other)
        place = self._place(1)
        where = f"{place.directory} or {place.tier.address}" if place.tier is not None else place.directory
        _log.warning("resume=latest found no checkpoint in %s: starting from the beginning.", where)
        return self._held(place, None)

    def _go_on_in_sweep(self) -> SaveDirectory:
        """In a restarted sweep, resume the job that had the same overrides, independent of its number."""
        used, others, has_any = self._settings, [], False
        for place in self._jobs():
            point = find(LATEST, place.directory, used.strict, used.verify, place.tier, is_own=self._is_own)
            has_any |= point is not None
            if point is not None and self._is_own(point.state):
                return self._held(place, point)
            if point is not None and self._sweep_job.wrote(point.state):
                others.append(point)
        if others:
            self._refuse(others[0])
        what = f"no job of this sweep with {self._sweep_job}" if has_any else "no checkpoint of this sweep"
        _log.warning("resume=latest found %s: %s starts from the beginning.", what, self._job)
        return self._fresh()

    def _jobs(self) -> Iterator[SavePlace]:
        """The places of all jobs of the sweep, this one's first."""
        own = self._job
        parent = self._place(1).directory.parent
        names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
        local = {match[1] for name in names if (match := re.fullmatch(r"(job_\d{1,6})(-\d{1,6})?", name))}
        numbered = (f"job_{number}" for number in itertools.count())
        remote = itertools.takewhile(lambda name: _is_used(self._place(1, name).tier), numbered)
        for name in dict.fromkeys([own, *sorted(local, key=lambda name: int(name[4:])), *remote]):
            yield from self._existing(name)

    def _fresh(self) -> SaveDirectory:
        if not self._saves:
            place = self._place(1)
            return SaveDirectory(place.directory, place.tier)
        passed: list[str] = []
        for place in self._numbered():
            taken = self._taken(place)
            if taken is None:
                claimed = self._claim(place)
                if not isinstance(claimed, LockHolder):
                    notes = [f"{passed[0]}: this run saves in {place.directory}."] if passed else []
                    return SaveDirectory(place.directory, place.tier, None, *claimed, notes)
                holder, found = claimed, self._differing(claimed.identity)
                if self._is_fixed or not found:
                    raise self._busy(place, holder)
                taken = f"is where another training saves now ({holder}; {found})"
            elif self._is_fixed:
                raise self._not_its_own(taken)
            passed.append(f"{place.directory} {taken}")
        raise AssertionError("there is always another number")

    def _not_its_own(self, taken: str) -> ConfigError:
        return ConfigError(
            f"checkpoint.save_dir is {self._settings.save_dir!r}: it {taken}. Use another directory for this run, or "
            "leave checkpoint.save_dir out, and it takes one by itself."
        )

    def _held(self, place: SavePlace, point: ResumePoint | None) -> SaveDirectory:
        if not self._saves:
            return SaveDirectory(place.directory, place.tier, point)
        claimed = self._claim(place)
        if isinstance(claimed, LockHolder):
            raise self._busy(place, claimed)
        return SaveDirectory(place.directory, place.tier, point, *claimed)

    def _claim(self, place: SavePlace) -> LockHolder | tuple[RunLock, StoreLease | None]:
        """Lock the directory and lease its location in object storage; returns the holder if one of them is taken."""
        lock = RunLock(place.directory, self._run_id, self._identity)
        if (holder := lock.acquire()) is not None:
            return holder
        if place.tier is None:
            return lock, None
        lease = StoreLease(_with_one_retry(place.tier).storage, lock.holder)
        try:
            if (holder := lease.acquire()) is not None:
                lock.release()
                return holder
        except StorageRefused as error:
            lock.release()
            raise place.tier.refused(error) from error
        except StorageError as error:
            _log.error(
                "%s cannot be read, so another run may be uploading there (%s): if so, the later one continues",
                place.tier.address, error,
            )  # fmt: skip
            return lock, None
        except BaseException:
            lock.release()
            raise
        lease.keep()
        return lock, lease

    def _busy(self, place: SavePlace, holder: LockHolder) -> ConfigError:
        found = self._differing(holder.identity)
        what = f"another training ({found})" if found else "this training"
        if isinstance(holder, LeaseRecord) and place.tier is not None:
            return ConfigError(
                f"storage leads to {place.tier.address}: a run of {what} is uploading there ({holder}). Wait for its "
                f"end, stop it (if it was killed, its lease expires after {LEASE_S:.0f} s), or give this "
                "run a place of its own: trainer.experiment_name=NAME, or storage.prefix=PREFIX."
            )
        return ConfigError(
            f"checkpoint.save_dir leads to {place.directory}: a run of {what} is saving there ({holder}). Wait for "
            "its end, stop it, or use another directory for this run: trainer.experiment_name=NAME, or "
            "checkpoint.save_dir=DIR."
        )

    def _refuse(self, other: ResumePoint) -> None:
        known = {**other.state, "identity": self._known(other.state.get("identity", {}))}
        try:
            refuse_other_identity(replace(other, state=known), self._identity)
        except ConfigError as error:
            raise ConfigError(
                [
                    *error.faults,
                    f"resume is 'latest': {other.published.directory.parent} holds no checkpoint of this training. "
                    "Start it without resume, and it saves in a directory of its own; resume=latest finds it there.",
                ]
            ) from error
        raise ConfigError(  # the same training, of another experiment
            f"resume is 'latest': {other.published.directory.parent} holds checkpoints of another experiment alone. "
            "Start without resume."
        )

    # -- what lies there ------------------------------------------------------------------------------------------

    def _place(self, number: int, job: str | None = None) -> SavePlace:
        project, experiment = self._trainer.project_name, self._trainer.experiment_name
        job = self._job if job is None else job
        directory, suffix = self._settings.directory(project, experiment, job), "" if number == 1 else f"-{number}"
        if not self._is_fixed:
            directory = directory.with_name(directory.name + suffix)
        names = (experiment, job + suffix) if job else (experiment + suffix, "")
        return SavePlace(directory, tier_of(self._given, self._storage, project, *names), number)

    def _numbered(self) -> Iterator[SavePlace]:
        return (self._place(number) for number in itertools.count(1))

    def _existing(self, job: str | None = None) -> Iterator[SavePlace]:
        """The first place of a job, this run's by default, and those after it that are there, on the local disk or in
        the store."""
        first = self._place(1, job)
        yield first
        if self._is_fixed and first.tier is None:
            return
        sibling_name = re.compile(re.escape(first.directory.name) + r"-([1-9]\d{0,8})")
        parent = first.directory.parent
        names = (path.name for path in parent.iterdir()) if parent.is_dir() and not self._is_fixed else ()
        local = {int(match[1]) for name in names if (match := sibling_name.fullmatch(name)) and int(match[1]) > 1}
        for number in itertools.count(2):
            place = self._place(number, job)
            if number in local or _is_used(place.tier):
                yield place
            elif number > max(local, default=0):
                return

    def _taken(self, place: SavePlace) -> str | None:
        """Whose checkpoints occupy a place; None if there are none, or only those of this training."""
        directory = CheckpointDirectory(place.directory)
        states: list[Mapping[str, Any]] = []
        for published in directory.survey()[0]:
            try:
                states.append(read_state(FileSystem(), published))
            except BadCheckpoint:  # damaged: nobody's, and retention leaves it alone
                continue
        if place.tier is not None and (newest := _newest_state(place.tier)) is not None:
            states.append(newest)
        if states and self._job:
            return "holds the checkpoints of an earlier sweep"
        for state in reversed(states):
            if not self._is_own(state):
                return f"holds checkpoints of another training ({self._differing(state.get('identity', {}))})"
            if place.number > 1 and not self._is_own_by_name(state):
                return "holds checkpoints of another experiment"
        return None

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        return not differences(self._known(state.get("identity", {})), self._identity) and self._sweep_job.wrote(state)

    def _is_own_by_name(self, state: Mapping[str, Any]) -> bool:
        """The same, and it was not a run of an experiment whose name happens to end in a number."""
        named = state.get("config", {}).get("trainer", {})
        ours = {"project_name": self._trainer.project_name, "experiment_name": self._trainer.experiment_name}
        return self._is_own(state) and all(named.get(key) == value for key, value in ours.items())

    def _differing(self, identity: Mapping[str, Any]) -> str:
        """The keys in which another training differs."""
        if not identity:
            return "it tells nothing of itself"
        found = list(differences(self._known(identity), self._identity))
        more = f" and {len(found) - MOST_KEYS} more" if len(found) > MOST_KEYS else ""
        return f"{', '.join(found[:MOST_KEYS])}{more} differ" if found else ""


def _points_of(place: SavePlace) -> Iterator[ResumePoint]:
    """What lies at a place, the newest first of each tier, by its state alone; a store that fails is left out."""
    for published in reversed(CheckpointDirectory(place.directory).survey()[0]):
        with contextlib.suppress(BadCheckpoint):
            yield ResumePoint(published, read_state(FileSystem(), published), "looked at")
    if place.tier is None:
        return
    remote = replace(place.tier, storage=place.tier.storage.hasty).connect()
    try:
        for record in reversed(remote.records()):
            with contextlib.suppress(BadCheckpoint):
                published = remote.open(record)
                yield ResumePoint(published, remote.state(published), "looked at")
    except StorageError as error:
        _log.warning("%s cannot be read: %s", place.tier.address, error)
    finally:
        remote.store.close()


_ABSENT = object()


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key, _ABSENT) if isinstance(tree, Mapping) else _ABSENT
    return tree


def _with_one_retry(tier: CheckpointTier) -> CheckpointTier:
    """Like the function, with one retry."""
    return replace(tier, storage=replace(tier.storage, retries=min(1, tier.storage.retries)))


def _is_used(tier: CheckpointTier | None) -> bool:
    return tier is not None and _newest_state(tier) is not None


def _newest_state(tier: CheckpointTier) -> Mapping[str, Any] | None:
    """Of the newest checkpoint in a store; None where it has none, or cannot say."""
    remote = _with_one_retry(tier).connect()
    try:
        records = remote.records()
        return remote.state(remote.open(records[-1])) if records else None
    except StorageRefused as error:
        raise tier.refused(error) from error
    except (StorageError, BadCheckpoint, ValueError) as error:
        _log.warning("%s cannot be read, so the owners of its checkpoints are unknown: %s", tier.address, error)
        return None
    finally:
        remote.store.close()


def ancestors_of(point: ResumePoint | None) -> dict[str, int]:
    """The runs that a run which goes on from a checkpoint descends from, each with the number of the last publication
    of it that belongs to this descent."""
    if point is None:
        return {}
    manifest, lineage = point.published.manifest, point.state.get("lineage")
    recorded = lineage.get("ancestors") if isinstance(lineage, Mapping) else None
    before = {
        str(run): number
        for run, number in (recorded.items() if isinstance(recorded, Mapping) else ())
        if isinstance(number, int)
    }
    return {**before, manifest.run_id: manifest.sequence}
