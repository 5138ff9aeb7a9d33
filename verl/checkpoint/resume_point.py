"""Checkpoint that `resume=` means: `latest`, a path, a run or an address in object storage."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import manifest_digest
from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.read.discovery import LATEST, POINTER, CheckpointDirectory, read_pointer
from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader, Level, open_verified
from verl.checkpoint.remote.commit_log import LogRecord
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.checkpoint.remote.transfer import CheckpointTier, bring, pull
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointUnsupported,
    ConfigError,
    FileFault,
    StorageError,
    VerlError,
)
from verl.storage.config import Storage, is_address
from verl.utils.external_input import parse_json

_log = logging.getLogger(__name__)

IsOwn = Callable[[Mapping[str, Any]], bool]  # whether `trainer_state.json` is of the training to resume


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from.

    Attributes:
        checkpoint: the checkpoint.
        state: its `trainer_state.json`.
        why: what was looked for, and why this one.
        storage: the place that `resume` gave the address of, from which it was fetched.
    """

    checkpoint: Checkpoint
    state: dict[str, Any]
    why: str
    storage: Storage | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def read_json(self, path: str) -> Any:
        """A JSON file of the checkpoint, hashed while it is read."""
        with self.understanding(path):
            return parse_json(CheckpointReader(self.checkpoint).read(path))

    @contextlib.contextmanager
    def understanding(self, path: str) -> Iterator[None]:
        """Context in which a file's content must be what a trainer reads.

        Raises:
            CheckpointCorrupt: it is of another form.
        """
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, VerlError):
                raise
            fault = FileFault(path, f"it does not hold what a trainer saves there ({type(error).__name__}: {error})")
            raise CheckpointCorrupt(self.checkpoint.directory, [fault]) from error

    def read_tensors(self, component: str) -> dict[str, Tensor]:
        """The tensors of a component, hashed while they are read; none if the checkpoint has no such component."""
        if not (self.checkpoint.directory / component).is_dir():
            return {}
        reader = CheckpointReader(self.checkpoint)
        return {t.name: as_tensor(reader.tensor(component, t.name), t) for t in reader.tensors(component)}


def find(
    resume: str,
    save_dir: Path,
    strict: bool = False,
    verify: bool = True,
    tier: CheckpointTier | None = None,
    storage: Storage | None = None,
    is_own: IsOwn | None = None,
) -> ResumePoint | None:
    """The checkpoint that `resume` refers to; None if `latest` finds none.

    Every byte of it is read and hashed. If a directory is searched and its newest checkpoint is damaged, a warning
    names the file and the tensor, and the previous checkpoint is used.

    Args:
        resume: `latest`, a checkpoint, a directory of checkpoints, the directory of a run, or an address of checkpoints
            in object storage.
        save_dir: where this run saves, and where `latest` looks.
        strict: a damaged checkpoint is an error, instead of being passed over.
        verify: false looks at names, sizes and headers alone.
        tier: where `latest` looks too; what is newer there is fetched.
        storage: settings for addresses of the same kind.
        is_own: of a directory, the newest checkpoint of this training is meant, wherever those of others stand. Where
            it holds those of others alone, their newest is returned, for the caller to refuse. None: any training.
    Raises:
        ConfigError: there is no such directory, it holds no checkpoint, or all of them are damaged.
        BadCheckpoint: it does not verify.
    """
    if not resume.strip():
        raise ConfigError("resume is empty: give latest, a checkpoint, its parent or a run, or leave it out.")
    if is_address(resume):
        return _fetched(resume, save_dir, storage)
    if resume == LATEST:
        what = f"resume=latest looked in {save_dir}" + (f" and {tier.address}" if tier is not None else "")
        try:
            return newest_point(save_dir, what, strict, verify, tier, is_own)
        except CheckpointNotFound:
            return None
    path = Path(resume).expanduser().absolute()
    if path.name == LATEST and CheckpointDirectory(path.parent).candidates():
        return _of_link(resume, path, strict, verify, is_own)
    if path.is_symlink():
        path = path.resolve()
    if not path.is_dir():
        raise ConfigError(f"resume is {resume!r}: no such directory. Give a checkpoint, its parent, a run, or latest.")
    if (path / MANIFEST).exists() or path.name.startswith("global_step_"):
        return _point(open_verified(FileSystem(), path, _level(verify)), f"resume={resume} names it")
    try:
        if (path / POINTER).is_file():
            return _of_run(resume, path, strict, verify)
        return newest_point(path, f"resume={resume} holds checkpoints", strict, verify, is_own=is_own)
    except CheckpointNotFound as error:
        raise ConfigError(f"resume is {resume!r}: {error}. Give a checkpoint, its parent, a run, or latest.") from error


def _of_link(resume: str, link: Path, strict: bool, verify: bool, is_own: IsOwn | None) -> ResumePoint:
    """The newest of a directory, whatever its link `latest` shows: that is a hint, and may be older."""
    newest = newest_point(
        link.parent, f"resume={resume} means the newest of {link.parent}", strict, verify, is_own=is_own
    )
    shown = os.readlink(link) if link.is_symlink() else ""
    if shown and shown != newest.checkpoint.name:
        _log.warning("%s shows %s, which is not the newest: taking %s.", link, shown, newest.checkpoint.name)
    return newest


def _of_run(resume: str, run_dir: Path, strict: bool, verify: bool) -> ResumePoint:
    """The newest checkpoint of a run: of its last start, else of the runs that it went on from, or of an earlier start
    in this directory."""
    pointer = read_pointer(run_dir)
    places = pointer.places(run_dir)
    what = f"resume={resume} is a run"
    for number, runs in enumerate(pointer.generations()):
        for directory in places:
            complete = CheckpointDirectory(directory).survey()[0] if directory.is_dir() else []
            if not any(_is_of(checkpoint, runs) for checkpoint in complete):
                continue
            if number:
                _log.warning(
                    "%s ended before its first save: resuming from the checkpoint that it was resumed from.", run_dir
                )
            if directory != places[0]:
                _log.info("%s says that it saved in %s; its checkpoints are in %s.", run_dir, places[0], directory)
            return newest_point(directory, what, strict, verify, is_counted=partial(_is_of, runs=runs))
    raise CheckpointNotFound(f"{places[0]} holds no complete checkpoint of run {pointer.run_id}")


def _is_of(checkpoint: Checkpoint, runs: Mapping[str, int | None]) -> bool:
    last = runs.get(checkpoint.manifest.run_id, 0)
    return last is None or checkpoint.sequence <= last


def _point(checkpoint: Checkpoint, why: str) -> ResumePoint:
    return ResumePoint(checkpoint, read_state(FileSystem(), checkpoint), why)


def _fetched(address: str, save_dir: Path, storage: Storage | None) -> ResumePoint:
    """The checkpoint that an address leads to, hashed while it was fetched."""
    try:
        checkpoint, location = bring(address, save_dir, storage)
        return replace(_point(checkpoint, f"fetched from {address}"), storage=location)
    except (CheckpointNotFound, StorageError) as error:
        raise ConfigError(f"resume is {address!r}: {error}") from error


def newest_point(
    directory: Path,
    what: str,
    strict: bool = False,
    verify: bool = True,
    tier: CheckpointTier | None = None,
    is_own: IsOwn | None = None,
    is_counted: Callable[[Checkpoint], bool] = lambda checkpoint: True,
) -> ResumePoint:
    """The newest checkpoint that is complete, on the local disk or in the store, from which it is fetched.

    A damaged one is named, and its copy in the other tier is taken, or the one before it; so is one whose objects the
    store does not give.

    Args:
        what: what was looked for, for `why`.
        is_own: whether a checkpoint is of this training, by its state. Where all are of others their newest is
            returned, for the caller to refuse; it is not fetched. None: any training.
        is_counted: whether a local checkpoint is looked at.
    Raises:
        CheckpointNotFound: neither has one.
        CheckpointUnsupported: another version of verl saved there.
        ConfigError: the store does not answer and the local disk has none, or all are damaged.
        BadCheckpoint: with `strict`, the first that is damaged.
    """
    local = CheckpointDirectory(directory)
    complete, bad = local.survey()
    faults: list[BadCheckpoint | StorageError] = []

    def leave_out(error: BadCheckpoint | StorageError, name: str) -> None:
        if strict or isinstance(error, CheckpointUnsupported):
            raise error
        reason = f"{name} of {tier.address}, which cannot be fetched: {error}" if tier and name else str(error)
        _log.error("NOT USING checkpoint %s", reason)
        faults.append(error)

    for error in bad:
        leave_out(error, "")
    complete = [checkpoint for checkpoint in complete if is_counted(checkpoint)]
    others: list[tuple[Checkpoint, dict[str, Any]]] = []
    with _records(tier, directory, bool(complete)) as (remote, records):
        for candidate in _in_order(local, complete, records):
            try:
                if is_own is not None and not is_own((seen := _seen(local, remote, candidate))[1]):
                    others.append(seen)
                    continue
                if isinstance(candidate, LogRecord):
                    assert remote is not None
                    checkpoint = pull(remote, candidate, CheckpointStore(directory), anew=True)
                else:
                    checkpoint = open_verified(local.disk, candidate.directory, _level(verify))
                state = read_state(local.disk, checkpoint)
            except BadCheckpoint as error:
                if isinstance(candidate, Checkpoint) and not local.exists(candidate.directory):  # pruned meanwhile
                    return newest_point(directory, what, strict, verify, tier, is_own, is_counted)
                leave_out(error, "")
            except StorageError as error:
                assert isinstance(candidate, LogRecord)
                leave_out(error, candidate.name or "a checkpoint")
            else:
                count = f"{what}: the last published of {len(complete) + len(records) - len(others)} complete ones"
                after = ", those after it being damaged" if faults else ""
                beside = f", {len(others)} of another training beside them" if others else ""
                return ResumePoint(checkpoint, state, count + after + beside)
    if others:
        return ResumePoint(*others[0], what)
    if faults:
        where = f"{directory} and {tier.address}, or such as cannot be fetched," if tier is not None else str(directory)
        raise ConfigError(
            f"resume finds damaged checkpoints in {where} and no whole one (the last: {faults[-1]}). Repair or remove "
            "them, or start without resume."
        )
    nowhere = f"{directory} holds no" if tier is None else f"neither {directory} nor {tier.address} holds a"
    raise CheckpointNotFound(f"{nowhere} complete checkpoint")


@contextlib.contextmanager
def _records(
    tier: CheckpointTier | None, directory: Path, has_local: bool
) -> Iterator[tuple[RemoteStore | None, list[LogRecord]]]:
    """The store of a tier and the checkpoints that it has; none without a tier, or if it does not answer."""
    if tier is None:
        yield None, []
        return
    remote, records = tier.connect(), []
    try:
        try:
            records = remote.records()
        except StorageError as error:
            if not has_local:
                raise ConfigError(
                    f"resume is 'latest': there is no checkpoint in {directory}, and {tier.address} cannot be "
                    f"read ({error}). Fix that, or start without resume."
                ) from error
            _log.error(
                "%s does not answer (%s), so a newer checkpoint there is not found: resuming from the local disk",
                tier.address,
                error,
            )
        yield remote, records
    finally:
        remote.store.close()


def _in_order(
    local: CheckpointDirectory, complete: list[Checkpoint], records: list[LogRecord]
) -> Iterator[Checkpoint | LogRecord]:
    """Checkpoints, newest first; for one in both tiers the local copy."""
    of_local = [((here.sequence, 1, _digest(local, here)), here) for here in complete]
    of_store = [((record.sequence, 0, record.manifest), record) for record in records]
    for _, candidate in sorted([*of_local, *of_store], key=lambda pair: pair[0], reverse=True):
        yield candidate


def _digest(local: CheckpointDirectory, here: Checkpoint) -> str:
    """The digest of a checkpoint's manifest; empty if it was pruned meanwhile, as is found when it is opened."""
    with contextlib.suppress(FileNotFoundError):
        return manifest_digest(local.disk, here)
    return ""


def _seen(
    local: CheckpointDirectory, remote: RemoteStore | None, candidate: Checkpoint | LogRecord
) -> tuple[Checkpoint, dict[str, Any]]:
    """A checkpoint with its location and its `trainer_state.json`."""
    if isinstance(candidate, Checkpoint):
        return candidate, read_state(local.disk, candidate)
    assert remote is not None
    checkpoint = remote.open(candidate)
    return checkpoint, remote.state(checkpoint)


def _level(verify: bool) -> Level:
    return "full" if verify else "quick"
