"""Resolution of a path to a checkpoint: `latest`, a checkpoint, a directory of them, a run directory, or an address.

resolve_path   a path on the disk ──> the directory of checkpoints, and which of them
resolve        what `resume=` says ──> one checkpoint, verified, from the disk or from object storage

The check before a run is the same call, `dry`: it reads manifests and states, and hashes, fetches and logs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.filesystem import FileSystem, read_errors
from verl.checkpoint.read.discovery import FORMAT, LATEST, CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader, Level, open_verified
from verl.checkpoint.remote.commit_log import LogRecord
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.checkpoint.remote.transfer import CheckpointTier, bring, find_at, pull
from verl.checkpoint.retention import Retention
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointTooNew,
    ConfigError,
    FileFault,
    StorageError,
    VerlError,
)
from verl.storage.config import Storage, is_address, storage_at
from verl.utils.external_input import LONGEST_NAME, ExternalInputError, parse_as, parse_json

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

OF_A_RUN = "checkpoints"
SAVED = "checkpoints.json"  # in a run's directory: see RunCheckpoints
SAVED_LIMIT_BYTES = 65_536
IsOwn = Callable[[Mapping[str, Any]], bool]  # whether `trainer_state.json` is of the training to resume


# -- a path on the disk ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints:
    """The place of a run's checkpoints, recorded in its directory at each start.

    Args:
        save_dir: absolute.
        relative: relative to the run's directory, for the case that both are moved together.
        run_id: of the last start.
        ancestors: the runs that it was resumed from, each with its last publication in the line of descent.
    """

    save_dir: str
    run_id: str
    relative: str = ""
    ancestors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: Path) -> RunCheckpoints | None:
        """The record in a directory; None if there is none.

        Raises:
            CheckpointNotFound: it is invalid.
        """
        try:
            record = parse_as(cls, FileSystem().read(run_dir / SAVED, SAVED_LIMIT_BYTES))
            paths = f"{record.save_dir}/{record.relative}".encode("utf-8", "replace")
            if b"\0" in paths or max(map(len, paths.split(b"/"))) > LONGEST_NAME:
                raise ExternalInputError("save_dir is not a path")
            return record
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ExternalInputError as error:
            raise CheckpointNotFound(f"{run_dir / SAVED} does not say where a run saves: {error}") from error

    @property
    def lineage(self) -> dict[str, int]:
        """The run and its ancestors, each with its last publication; see `Retention.lineage`."""
        return {**self.ancestors, self.run_id: sys.maxsize}

    def places(self, run_dir: Path) -> list[Path]:
        """The directory that was recorded, and the one at the same place relative to the run's directory."""
        moved = [Path(os.path.normpath(run_dir.absolute() / self.relative))] if self.relative else []
        return list(dict.fromkeys([Path(self.save_dir), *moved]))


@dataclass(frozen=True)
class ResolvedPath:
    """Result of `resolve_path`.

    Args:
        directory: of checkpoints.
        name: of one checkpoint in it, or `latest`; None if the path is the directory itself.
        lineage: of a run directory: the runs whose checkpoints are meant, each with its last publication.
    """

    directory: Path
    name: str | None = None
    lineage: dict[str, int] | None = field(default=None, compare=False)

    def covers(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint of the directory is meant."""
        return Retention(lineage=self.lineage).covers(checkpoint)

    def open(self, level: Level = "quick") -> Checkpoint:
        """The checkpoint that is meant: the named one, else the newest. Raises as `CheckpointDirectory.open`."""
        directory, name = CheckpointDirectory(self.directory), self.name
        if name in (None, LATEST):
            name = directory.newest(is_meant=self.covers).name
        return directory.open(name, level)


def resolve_path(path: str | Path) -> ResolvedPath:
    """Resolve the path of a checkpoint, a directory of checkpoints or a run directory. It may be relative, end in a
    slash, and contain symbolic links.

    `latest` is the newest complete checkpoint, independent of the symbolic link of this name.
    >>> resolve_path("checkpoints/latest/")
    ResolvedPath(directory=PosixPath('/.../checkpoints'), name='latest', ...)

    Raises:
        CheckpointNotFound: there are no checkpoints, or they are in object storage.
        CheckpointReadFailed: the file system refused.
    """
    if is_address(str(path)):
        raise CheckpointNotFound(
            f"{path} is in object storage: this works on a disk. Fetch it with `verl checkpoint pull {path} DIR`, and "
            "give DIR"
        )
    absolute = Path(path).expanduser().absolute()
    with read_errors(f"looking at {path}"):
        if absolute.name == LATEST and _holds_checkpoints(absolute.parent):
            return ResolvedPath(absolute.parent, LATEST)
        real = Path(os.path.realpath(absolute))
        parent = CheckpointDirectory(real.parent)
        if parent.exists(real) and parent.is_candidate(real):
            return ResolvedPath(real.parent, real.name)
        if (run := RunCheckpoints.of(real)) is not None:
            return _saved_by(real, run)
        for directory in (real, real / OF_A_RUN):
            if _holds_checkpoints(directory):
                return ResolvedPath(directory)
        raise CheckpointNotFound(f"{path} {_instead(absolute, real)}")


def directories_below(directory: Path) -> list[Path]:
    """Directories of checkpoints one or two levels below a directory, as in `checkpoints/PROJECT/EXPERIMENT`."""
    return [file.parent for below in ("*", "*/*") for file in sorted(directory.glob(f"{below}/{FORMAT}"))]


def _saved_by(run_dir: Path, run: RunCheckpoints) -> ResolvedPath:
    there = [ResolvedPath(x, lineage=run.lineage) for x in run.places(run_dir) if _holds_checkpoints(x)]
    if there:
        own = (x for x in there if any(map(x.covers, CheckpointDirectory(x.directory).survey()[0])))
        return next(own, there[0])
    raise CheckpointNotFound(
        f"{run_dir} is of a run that saved in {run.save_dir}, and there are no checkpoints in "
        f"{' or '.join(map(str, run.places(run_dir)))}. Give the directory that they are in now"
    )


def _holds_checkpoints(directory: Path) -> bool:
    checkpoints = CheckpointDirectory(directory)
    with contextlib.suppress(NotADirectoryError):
        return checkpoints.exists(directory / FORMAT) or bool(checkpoints.candidates())
    return False


def _instead(given: Path, real: Path) -> str:
    """Hint for an error: what is there, and what to pass."""
    if not CheckpointDirectory(real.parent).exists(real):
        link = f"is a symbolic link to {os.readlink(given)}, which " if given.is_symlink() else ""
        return f"{link}does not exist"
    for parent in real.parents:
        if CheckpointDirectory(parent.parent).is_candidate(parent):
            return f"is inside the checkpoint {parent}: give that directory"
    if not real.is_dir():
        return "is a file: give a directory of checkpoints, or one checkpoint"
    if below := directories_below(real):
        return f"holds no checkpoints itself; there are some in {' and '.join(map(str, below[:3]))}"
    return "holds no checkpoints: give a directory of checkpoints, one of them, or a run that saved some"


# -- the checkpoint to resume from -------------------------------------------------------------------------------------


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
        from verl.checkpoint.read.lazy_tensors import as_tensor

        if not (self.checkpoint.directory / component).is_dir():
            return {}
        reader = CheckpointReader(self.checkpoint)
        return {t.name: as_tensor(reader.tensor(component, t.name), t) for t in reader.tensors(component)}


def resolve(
    path: str,
    save_dir: Path,
    *,
    strict: bool = False,
    verify: bool = True,
    tier: CheckpointTier | None = None,
    storage: Storage | None = None,
    is_own: IsOwn | None = None,
    dry: bool = False,
    setting: str = "resume",
) -> ResumePoint | None:
    """The checkpoint that a path means; None if `latest` finds none.

    Every byte of it is read and hashed. If a directory is searched and its newest checkpoint is damaged, a warning
    names the file and the tensor, and the previous checkpoint is used.

    Args:
        path: `latest`, a checkpoint, a directory of checkpoints, the directory of a run, or an address in object
            storage.
        save_dir: where this run saves, and where `latest` looks.
        strict: a damaged checkpoint is an error, instead of being passed over.
        verify: false looks at names, sizes and headers alone.
        tier: where `latest` looks too; what is newer there is fetched.
        storage: settings for addresses of the same kind.
        is_own: of a directory, the newest checkpoint of this training is meant, wherever those of others stand. Where
            it holds those of others alone, their newest is returned, for the caller to refuse. None: any training.
        dry: find it, and do nothing else.
        setting: what gave the path, for messages.
    Raises:
        ConfigError: there is no such directory, it holds no checkpoint, or all of them are damaged.
        BadCheckpoint: it does not verify.
    """
    if not path.strip():
        raise ConfigError(f"{setting} is {path!r}: give latest, a checkpoint, its parent or a run.")
    if is_address(path):
        return _at_address(path, save_dir, storage, dry, setting)
    search = _Search(strict=strict, verify=verify, is_own=is_own, dry=dry, setting=setting)
    if path == LATEST:
        what = f"{setting}=latest looked in {save_dir}" + (f" and {tier.address}" if tier is not None else "")
        return search.newest(save_dir, what, tier=tier)
    try:
        where = resolve_path(path)
        if where.name not in (None, LATEST):
            checkpoint = search.verified(where.directory / where.name)
            return ResumePoint(checkpoint, read_state(FileSystem(), checkpoint), f"{setting}={path} names it")
        if (point := search.newest(where.directory, f"{setting}={path}", where.lineage)) is not None:
            return point
        whose = "" if where.lineage is None else " of this run"
        raise CheckpointNotFound(f"{where.directory} holds no complete checkpoint{whose}")
    except CheckpointNotFound as error:
        raise ConfigError(
            f"{setting} is {path!r}: {error}. Give a checkpoint, its parent, a run, or latest."
        ) from error


def _at_address(address: str, save_dir: Path, storage: Storage | None, dry: bool, setting: str) -> ResumePoint:
    """The checkpoint that an address leads to, hashed while it is fetched."""
    try:
        if dry:
            storage_at(address.rstrip("/"), storage).hasty.connect().list("preflight/")
            remote, record = find_at(address, storage)
            found = remote.open(record) if record is not None else remote.newest()
            return ResumePoint(found, remote.state(found), f"seen at {address}")
        checkpoint, place = bring(address, save_dir, storage)
        return ResumePoint(checkpoint, read_state(FileSystem(), checkpoint), f"fetched from {address}", place)
    except (CheckpointNotFound, ConfigError, StorageError) as error:
        raise ConfigError(f"{setting} is {address!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A search of the newest checkpoint; see `resolve`."""

    strict: bool
    verify: bool
    is_own: IsOwn | None
    dry: bool
    setting: str

    def newest(
        self, directory: Path, what: str, lineage: dict[str, int] | None = None, tier: CheckpointTier | None = None
    ) -> ResumePoint | None:
        """The checkpoint that was published last and is complete, on the local disk or in the store, from which it is
        fetched; None if neither has one.

        A damaged one is named, and its copy in the other tier is taken, or the one before it; so is one whose objects
        the store does not give.

        Args:
            what: what was looked for.
            lineage: of a run, whose checkpoints alone are meant.
        """
        local = CheckpointDirectory(directory)
        good, bad = local.survey()
        faults = [self._passed_over(error) for error in bad]
        others: list[ResumePoint] = []
        with contextlib.ExitStack() as stack:
            remote = None if tier is None else RemoteStore(stack.enter_context(tier.storage.connect()))
            found = [*good, *self._records(remote, directory, bool(good or bad))]
            # Of one that is in both, the local copy first
            for one in sorted(found, key=lambda one: (one.sequence, isinstance(one, Checkpoint)), reverse=True):
                try:
                    seen = self._seen(one, remote, what)
                    if not Retention(lineage=lineage).covers(seen.checkpoint):
                        continue
                    if self.is_own is not None and not self.is_own(seen.state):
                        others.append(seen)
                        continue
                    if self.dry:
                        return seen
                    if isinstance(one, Checkpoint) or remote is None:
                        checkpoint = self.verified(local.directory / one.name)
                    else:
                        checkpoint = pull(remote, one, CheckpointStore(directory), anew=True)
                    why = f"{what}: the last one that was published{', of this training' if others else ''}"
                    return ResumePoint(checkpoint, read_state(local.disk, checkpoint), why)
                except (BadCheckpoint, StorageError) as error:
                    if isinstance(one, Checkpoint) and not local.exists(one.directory):  # pruned meanwhile
                        return self.newest(directory, what, lineage, tier)
                    where = "" if tier is None else f"{one.name} of {tier.address}, which cannot be fetched: "
                    faults.append(self._passed_over(error, where))
        if faults and not others:
            where = str(directory) if tier is None else f"{directory} and {tier.address}, or such as cannot be fetched,"
            raise ConfigError(
                f"{self.setting} finds damaged checkpoints in {where} and no whole one (the last: {faults[-1]}). "
                f"Repair or remove them, or start without {self.setting}."
            )
        return others[0] if others else None

    def verified(self, directory: Path) -> Checkpoint:
        """Open a checkpoint, with a hash of every byte if that is asked for."""
        return open_verified(FileSystem(), directory, "full" if self.verify and not self.dry else "quick")

    def _passed_over(self, error: BadCheckpoint | StorageError, where: str = "") -> BadCheckpoint | StorageError:
        """Log why a checkpoint is not used, or raise the error if no other may be used in its place."""
        if self.strict or isinstance(error, CheckpointTooNew):
            raise error
        self._say("NOT USING checkpoint %s%s", "" if isinstance(error, BadCheckpoint) else where, error)
        return error

    def _seen(self, found: Checkpoint | LogRecord, remote: RemoteStore | None, what: str) -> ResumePoint:
        """A checkpoint with its state, where it is."""
        if isinstance(found, Checkpoint):
            return ResumePoint(found, read_state(FileSystem(), found), what)
        assert remote is not None
        checkpoint = remote.open(found)
        return ResumePoint(checkpoint, remote.state(checkpoint) if self.dry or self.is_own else {}, what)

    def _say(self, sentence: str, *values: object) -> None:
        _log.log(logging.DEBUG if self.dry else logging.ERROR, sentence, *values)

    def _records(self, remote: RemoteStore | None, directory: Path, has_local: bool) -> list[LogRecord]:
        """The checkpoints of a store; none without one, or if it does not answer and there are local ones."""
        try:
            return [] if remote is None else remote.records()
        except StorageError as error:
            address = "" if remote is None else remote.store.address
            if not has_local:
                raise ConfigError(
                    f"resume is 'latest': there is no checkpoint in {directory}, and {address} cannot be read "
                    f"({error}). Fix that, or start without resume."
                ) from error
            self._say("%s does not answer (%s): resuming from the local disk", address, error)
            return []
