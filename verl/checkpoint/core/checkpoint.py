"""Opening a checkpoint: COMMIT and the manifest are verified before any other file of the directory is used.

`FORMATS` lists which version of verl reads which checkpoints; `findings` reports what a change of version would break.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

import verl
from verl.checkpoint.core.filesystem import OUT_OF_RESOURCES, FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import (
    COMMIT,
    COMMIT_LIMIT_BYTES,
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    FileEntry,
    LogicalTensor,
    Manifest,
    ManifestError,
    ManifestTooNew,
    SavedSlice,
    commit_line,
    is_readable,
)
from verl.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointTooNew,
    ConfigError,
    FileFault,
)
from verl.utils.external_input import ExternalInputError, checked_as, parse_mapping


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose COMMIT matches its manifest.

    >>> checkpoint = open_checkpoint(FileSystem(), Path("checkpoints/global_step_100"))
    >>> checkpoint.step, checkpoint.sequence
    (100, 1)
    """

    directory: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.manifest.step

    @property
    def sequence(self) -> int:
        """Publication number, increasing within a directory."""
        return self.manifest.sequence

    @property
    def num_bytes(self) -> int:
        """Total size of all decoded files, including files shared with other checkpoints."""
        return sum(entry.size for entry in self.manifest.contents.values())

    @cached_property
    def slices_by_file(self) -> dict[str, list[tuple[LogicalTensor, SavedSlice]]]:
        slices: dict[str, list[tuple[LogicalTensor, SavedSlice]]] = {}
        for tensor in self.manifest.tensors:
            for part in tensor.slices:
                slices.setdefault(part.file, []).append((tensor, part))
        return slices

    def tensors_in(self, file: str, begin: int = 0, end: float = math.inf) -> tuple[str, ...]:
        """Full names of the tensors with bytes in a range of a file."""
        parts = self.slices_by_file.get(file, ())
        overlapping = [t for t, part in parts if part.offset < end and begin < part.offset + t.slice_bytes(part)]
        return tuple(tensor.full_name for tensor in overlapping)

    def fault(self, file: str, problem: str, begin: int = 0, end: float = math.inf) -> FileFault:
        """A fault of a file, or of a range of it, with the tensors there."""
        return FileFault(file, problem, self.tensors_in(file, begin, end))

    def check_leaf(self, entry: FileEntry, number: int, begin: int, data: bytes | memoryview, of: str = "") -> None:
        """Check that a leaf of a file, from the offset `begin`, is what was written.

        Args:
            of: what the bytes belong to, if not to the file, for the message.
        Raises:
            CheckpointCorrupt: it is not; names the tensors.
        """
        if digest_of(data) != entry.leaves[number].blake3:
            end = begin + entry.leaves[number].size
            problem = f"bytes {begin} to {end}{of} are not those that were written"
            raise CheckpointCorrupt(self.directory, [self.fault(entry.path, problem, begin, end)])

    def checked_leaves(self, entry: FileEntry, leaves: Iterable[bytes], of: str = "") -> Iterator[bytes]:
        """The leaves of a file, each given once it is checked, see `check_leaf`."""
        begin = 0
        for number, data in enumerate(leaves):
            self.check_leaf(entry, number, begin, data, of)
            yield data
            begin += entry.leaves[number].size

    def path(self, file: str) -> Path:
        """Absolute path of a file of this checkpoint."""
        return self.directory / file


def open_checkpoint(disk: FileSystem, directory: Path) -> Checkpoint:
    """Open a checkpoint: read COMMIT and the manifest, and nothing else.

    Raises:
        CheckpointIncomplete: COMMIT or the manifest is missing.
        CheckpointCorrupt: COMMIT or the manifest cannot be read, or they do not match.
        CheckpointTooNew: its format is not supported.
    """
    disk.contain(directory)
    commit = _read_own(disk, directory, COMMIT, COMMIT_LIMIT_BYTES)
    data = _read_own(disk, directory, MANIFEST, MANIFEST_LIMIT_BYTES)
    if commit != commit_line(data):
        problem = f"it is not the manifest that {COMMIT} names (its digest is {digest_of(data)[:16]}...)"
        raise CheckpointCorrupt(directory, [FileFault(MANIFEST, problem)])
    return Checkpoint(directory, parse_manifest(directory, data))


def parse_manifest(directory: Path, data: bytes) -> Manifest:
    """The content of a `manifest.json`.

    Args:
        directory: of the checkpoint, for messages.
    Raises:
        CheckpointCorrupt, CheckpointTooNew: not a manifest, or an unsupported format.
    """
    try:
        return Manifest.from_bytes(data)
    except ManifestError as error:
        kind = CheckpointTooNew if isinstance(error, ManifestTooNew) else CheckpointCorrupt
        raise kind(directory, [FileFault(MANIFEST, str(error))]) from error


def read_state(disk: FileSystem, checkpoint: Checkpoint) -> dict[str, Any]:
    """`trainer_state.json`, checked against the manifest.

    Raises:
        CheckpointCorrupt: its bytes differ from what was written.
    """
    entry = checkpoint.manifest.contents[STATE]
    disk.contain(checkpoint.directory)
    data = _read_own(disk, checkpoint.directory, STATE, MANIFEST_LIMIT_BYTES)
    if len(data) != entry.size or digest_of(data) != entry.blake3:
        raise CheckpointCorrupt(checkpoint.directory, [FileFault(STATE, "its bytes are not those that were written")])
    return parse_state(checkpoint.directory, data)


@dataclass
class SavedProgress:
    """Types of the fields that are read from `progress` in a `trainer_state.json`."""

    samples: int = 0
    train_s: float = 0.0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class SavedState:
    """Types of the fields that are read from a `trainer_state.json`; other fields are not checked."""

    step: int = 0
    epoch: float | None = None
    manifest_checksum: str = ""
    loss_history: list[Any] = field(default_factory=list)
    best: float | None = None
    wall_clock_s: float = 0.0
    lineage: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    trackers: dict[str, Any] = field(default_factory=dict)
    progress: SavedProgress = field(default_factory=SavedProgress)


def parse_state(directory: Path, data: bytes | memoryview) -> dict[str, Any]:
    """The content of a `trainer_state.json`.

    Args:
        directory: of the checkpoint, for messages.
    Raises:
        CheckpointCorrupt: the content is invalid.
    """
    try:
        state = parse_mapping(data)
        checked_as(SavedState, state)
        if unknown := [step for step in state.get("progress", {}).get("evaluations", {}) if not step.isdecimal()]:
            raise ExternalInputError(f"progress.evaluations: {unknown[0][:80]!r} is not a step")
        if any(type(number) is not int for number in (state.get("lineage", {}).get("ancestors") or {}).values()):
            raise ExternalInputError("lineage.ancestors: expected the number of a publication for each run")
        return state
    except (ExternalInputError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(directory, [FileFault(STATE, f"it tells no state of a trainer: {error}")]) from error


def loss_points(state: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The loss curve of `trainer_state.json`: (step, loss), each loss a number.

    An entry is `[step, loss]` or `{"step": ..., "loss": ...}`; a loss that is not finite may be the text "nan", "inf"
    or "-inf". Invalid entries are skipped.
    """
    points = []
    for entry in state.get("loss_history") or ():
        try:
            step, loss = (entry["step"], entry["loss"]) if isinstance(entry, Mapping) else entry
            points.append((int(step), float(loss)))
        except (KeyError, TypeError, ValueError):
            continue
    return points


def _read_own(disk: FileSystem, directory: Path, name: str, limit: int) -> bytes:
    try:
        return disk.read(directory / name, limit)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointIncomplete(directory, [FileFault(name, "it is missing")]) from error
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        raise CheckpointCorrupt(
            directory, [FileFault(name, f"it cannot be read: {error.strerror or error}")]
        ) from error


class FormatOf(NamedTuple):
    """The format written by verl from this version on; it reads all that precede it."""

    verl: str
    writes: str


FORMATS = (FormatOf("0.3.0", writes=FORMAT_VERSION),)  # a row for every version of verl that changed the format


@dataclass(frozen=True, kw_only=True)
class FormatFinding:
    """Compatibility of one checkpoint.

    Args:
        format_version, verl_version: as recorded; None if the manifest cannot be read.
        breaks: why the target version cannot read it; None if it can.
        note: further information.
    """

    name: str
    format_version: str | None = None
    verl_version: str | None = None
    breaks: str | None = None
    note: str | None = None


def parse_version(text: str, where: str) -> Version:
    """Parse a version such as `0.3.5` or `v0.3.5`.

    Raises:
        ConfigError: the text is not a version.
    """
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ConfigError(f"{where} is {text!r}: it must be a version, such as v0.3.5.") from error


def format_of(version: Version) -> FormatOf | None:
    """The format that a version of verl writes; None for versions before the first format.

    A version later than this one is treated like this one, because it must read everything that this one reads.
    """
    known = [row for row in FORMATS if Version(row.verl) <= version]
    return known[-1] if known else None


def is_ahead(version: Version) -> bool:
    """Whether a version is newer than this one, so that its format is unknown here."""
    return version > Version(verl.__version__)


def findings(directories: list[Path], moving_from: Version, moving_to: Version) -> list[FormatFinding]:
    """Compatibility of each checkpoint when a run moves from one version of verl to another."""
    return [_finding(directory, moving_from, moving_to) for directory in directories]


def _finding(directory: Path, moving_from: Version, moving_to: Version) -> FormatFinding:
    try:
        raw = parse_mapping(FileSystem().read(directory / MANIFEST, MANIFEST_LIMIT_BYTES))
        if raw["format"]["name"] != FORMAT_NAME:
            raise ValueError("it is not a manifest of a checkpoint")
        written, by = str(Version(str(raw["format"]["version"]))), Version(str(raw["verl_version"]))
    except (OSError, ValueError, KeyError, TypeError):
        return FormatFinding(name=directory.name, breaks=f"{MANIFEST} cannot be read; see verl checkpoint verify")
    return FormatFinding(
        name=directory.name,
        format_version=written,
        verl_version=str(by),
        breaks=_reason(written, moving_to),
        note=None if by == moving_from else f"written by verl {by}, not {moving_from}",
    )


def _reason(written: str, moving_to: Version) -> str | None:
    """Why a version cannot read a checkpoint; None if it can."""
    row = format_of(moving_to)
    if row is None:
        return f"verl {moving_to} has no checkpoints of this kind; the first version that has is {FORMATS[0].verl}"
    if is_readable(written, by=row.writes):
        return None
    of = f"verl {verl.__version__} knows of verl {moving_to}" if is_ahead(moving_to) else f"verl {moving_to} reads"
    return f"format {written} is not of the major versions up to {row.writes}, the newest that {of}"
