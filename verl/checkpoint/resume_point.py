"""Checkpoint that `resume=` means: `latest`, a path, a run or an address in object storage."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.read.discovery import LATEST, POINTER, CheckpointDirectory, read_pointer
from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.read.verify import Level, open_verified
from verl.checkpoint.remote.resolve import CheckpointTier, bring, newest_of_tiers
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointNotFound,
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
        try:
            if tier is not None:
                checkpoint, state = newest_of_tiers(save_dir, tier, _level(verify), strict, is_own)
                return ResumePoint(checkpoint, state, f"resume=latest looked in {save_dir} and {tier.address}")
            return _newest(save_dir, strict, verify, f"resume=latest looked in {save_dir}", is_own=is_own)
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
        return _newest(path, strict, verify, f"resume={resume} holds checkpoints", is_own=is_own)
    except CheckpointNotFound as error:
        raise ConfigError(f"resume is {resume!r}: {error}. Give a checkpoint, its parent, a run, or latest.") from error


def _of_link(resume: str, link: Path, strict: bool, verify: bool, is_own: IsOwn | None) -> ResumePoint:
    """The newest of a directory, whatever its link `latest` shows: that is a hint, and may be older."""
    found = _newest(link.parent, strict, verify, f"resume={resume} means the newest of {link.parent}", is_own=is_own)
    shown = os.readlink(link) if link.is_symlink() else ""
    if shown and shown != found.checkpoint.name:
        _log.warning("%s shows %s, which is not the newest: taking %s.", link, shown, found.checkpoint.name)
    return found


def _of_run(resume: str, run_dir: Path, strict: bool, verify: bool) -> ResumePoint:
    """The newest checkpoint of a run: of its last start, else of the runs that it went on from, or of an earlier start
    in this directory."""
    pointer = read_pointer(run_dir)
    places = pointer.places(run_dir)
    what = f"resume={resume} is a run"
    for number, runs in enumerate(pointer.generations()):
        for directory in places:
            if not _has_any(directory, runs):
                continue
            if number:
                _log.warning(
                    "%s ended before its first save: resuming from the checkpoint that it was resumed from.", run_dir
                )
            if directory != places[0]:
                _log.info("%s says that it saved in %s; its checkpoints are in %s.", run_dir, places[0], directory)
            return _newest(directory, strict, verify, what, runs)
    raise CheckpointNotFound(f"{places[0]} holds no complete checkpoint of run {pointer.run_id}")


def _has_any(directory: Path, runs: Mapping[str, int | None]) -> bool:
    looked_at = CheckpointDirectory(directory)
    return directory.is_dir() and any(_is_of(checkpoint, runs) for checkpoint in looked_at.survey()[0])


def _is_of(checkpoint: Checkpoint, runs: Mapping[str, int | None]) -> bool:
    last = runs.get(checkpoint.manifest.run_id, 0)
    return last is None or checkpoint.sequence <= last


def _point(checkpoint: Checkpoint, why: str) -> ResumePoint:
    return ResumePoint(checkpoint, read_state(FileSystem(), checkpoint), why)


def _fetched(address: str, save_dir: Path, storage: Storage | None) -> ResumePoint:
    """The checkpoint that an address leads to, hashed while it was fetched."""
    try:
        checkpoint, place = bring(address, save_dir, storage)
        return replace(_point(checkpoint, f"fetched from {address}"), storage=place)
    except (CheckpointNotFound, StorageError) as error:
        raise ConfigError(f"resume is {address!r}: {error}") from error


def _newest(
    directory: Path,
    strict: bool,
    verify: bool,
    what: str,
    runs: Mapping[str, int | None] | None = None,
    is_own: IsOwn | None = None,
) -> ResumePoint:
    looked_at = CheckpointDirectory(directory)
    try:
        looked_at.newest(strict)
    except CheckpointNotFound:
        if looked_at.candidates():
            raise _all_damaged(directory) from None
        raise
    complete = looked_at.complete()
    found: list[tuple[Checkpoint, dict[str, Any]]] = []
    for checkpoint in complete:
        if runs is None or _is_of(checkpoint, runs):
            try:
                found.append((checkpoint, read_state(FileSystem(), checkpoint)))
            except BadCheckpoint as error:
                if strict:
                    raise
                _log.error("NOT USING checkpoint %s", error)
    if not found:
        raise _all_damaged(directory)
    own = [(checkpoint, state) for checkpoint, state in found if is_own is None or is_own(state)]
    others = len(found) - len(own)
    chosen = own or found
    for checkpoint, state in reversed(chosen):
        try:
            open_verified(FileSystem(), checkpoint.directory, _level(verify))
        except BadCheckpoint as error:
            if strict:
                raise
            _log.error("NOT USING checkpoint %s", error)
        else:
            after = "" if checkpoint is chosen[-1][0] else ", those after it being damaged"
            others_text = f", {others} of another training beside them" if own and others else ""
            why = f"{what}: the last published of {len(chosen)} complete ones{after}{others_text}"
            return ResumePoint(checkpoint, state, why)
    raise _all_damaged(directory)


def _all_damaged(directory: Path) -> ConfigError:
    """The error for a directory without an intact checkpoint; the run does not start from the beginning."""
    return ConfigError(
        f"resume finds damaged checkpoints in {directory} and no whole one; the log names what is wrong. Repair "
        "or remove them, or start without resume."
    )


def _level(verify: bool) -> Level:
    return "full" if verify else "quick"
