"""Descriptions of checkpoints for the command line, as plain values: completeness, content and size of each."""

from __future__ import annotations

import dataclasses
import math
import time
from calendar import timegm
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint, open_checkpoint, read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.read.reader import Level, open_verified
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointTooNew,
    FileFault,
)

Status = Literal["complete", "incomplete", "corrupt", "too new"]


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint, whole or not.

    Args:
        checkpoint: the checkpoint; None if its manifest is invalid.
        state: `trainer_state.json`; empty if it cannot be read.
        added_bytes: size of the files that it shares with no earlier checkpoint.
        is_newest: a run would resume from this one.
    """

    directory: Path
    status: Status
    faults: tuple[FileFault, ...] = ()
    checkpoint: Checkpoint | None = None
    state: dict[str, Any] = field(default_factory=dict)
    added_bytes: int = 0
    is_newest: bool = False

    @property
    def name(self) -> str:
        return self.directory.name

    def to_json(self) -> dict[str, Any]:
        """JSON values for scripts."""
        described: dict[str, Any] = {"name": self.name, "path": str(self.directory), "status": self.status}
        described |= {"is_newest": self.is_newest, "faults": [dataclasses.asdict(fault) for fault in self.faults]}
        if self.checkpoint is None:
            return described
        manifest = self.checkpoint.manifest
        keys = ("step", "tag", "sequence", "run_id", "saved_at", "verl_version", "metrics")
        described |= {key: getattr(manifest, key) for key in keys}
        described |= {"format_version": manifest.version, "epoch": self.state.get("epoch")}
        described |= {"bytes": self.checkpoint.num_bytes, "added_bytes": self.added_bytes}
        return described | {"num_files": len(manifest.contents), "num_tensors": len(manifest.tensors)}


@dataclass(frozen=True, kw_only=True)
class ComponentSummary:
    """A component of a checkpoint, such as `actor`; files outside of components count as components with their own
    name."""

    name: str
    num_files: int
    bytes: int
    num_tensors: int
    num_elements: int
    dtypes: tuple[str, ...]


def summaries(store: CheckpointStore, name: str | None = None, level: Level = "quick") -> list[CheckpointSummary]:
    """All checkpoints of a directory in order of publication, then those that do not verify; or only the one named."""
    good, bad = store.survey()
    newest = good[-1].name if good and not any(isinstance(error, CheckpointTooNew) for error in bad) else None
    seen = set[tuple[int, int]]()
    added = {checkpoint.name: _added_bytes(store.disk, checkpoint, seen) for checkpoint in good}
    directories = [*(checkpoint.directory for checkpoint in good), *(error.directory for error in bad)]
    return [
        dataclasses.replace(
            summary_of(store.disk, directory, level),
            added_bytes=added.get(directory.name, 0),
            is_newest=directory.name == newest,
        )
        for directory in directories
        if name in (None, directory.name)
    ]


def summary_of(disk: FileSystem, directory: Path, level: Level = "quick") -> CheckpointSummary:
    """Summary of one checkpoint; for a damaged one as far as it can be read."""
    try:
        return _summarize(disk, open_verified(disk, directory, level))
    except BadCheckpoint as error:
        bad = error
    try:
        known = _summarize(disk, open_checkpoint(disk, directory))
    except BadCheckpoint:
        known = CheckpointSummary(directory=directory, status="corrupt")
    return dataclasses.replace(known, status=status_of(bad), faults=bad.faults)


def _summarize(disk: FileSystem, checkpoint: Checkpoint) -> CheckpointSummary:
    """Summary of a checkpoint that can be opened; its state may be damaged."""
    try:
        state = read_state(disk, checkpoint)
    except BadCheckpoint as error:
        return CheckpointSummary(
            directory=checkpoint.directory, status=status_of(error), faults=error.faults, checkpoint=checkpoint
        )
    return CheckpointSummary(directory=checkpoint.directory, status="complete", checkpoint=checkpoint, state=state)


def components(checkpoint: Checkpoint) -> list[ComponentSummary]:
    """The components of a checkpoint, the largest first."""
    files: dict[str, list[int]] = {}
    for entry in checkpoint.manifest.contents.values():
        files.setdefault(entry.path.split("/")[0], []).append(entry.size)
    tensors: dict[str, list] = {}
    for tensor in checkpoint.manifest.tensors:
        tensors.setdefault(tensor.component, []).append(tensor)
    parts = [
        ComponentSummary(
            name=name,
            num_files=len(files.get(name, ())),
            bytes=sum(files.get(name, ())),
            num_tensors=len(tensors.get(name, ())),
            num_elements=sum(math.prod(tensor.shape) for tensor in tensors.get(name, ())),
            dtypes=tuple(sorted({tensor.dtype for tensor in tensors.get(name, ())})),
        )
        for name in sorted(files.keys() | tensors.keys())
    ]
    return sorted(parts, key=lambda part: -part.bytes)


def age_s(checkpoint: Checkpoint) -> float:
    """Seconds since it was saved; 0 if its clock was ahead of this machine's.

    Raises:
        CheckpointCorrupt: the recorded time is invalid.
    """
    text = checkpoint.manifest.saved_at
    try:
        saved = timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except (TypeError, ValueError) as error:
        fault = FileFault(MANIFEST, f"saved_at is {text!r}, which is no time")
        raise CheckpointCorrupt(checkpoint.directory, [fault]) from error
    return max(0.0, time.time() - saved)


def status_of(error: BadCheckpoint) -> Status:
    """Status text of a damaged checkpoint."""
    if isinstance(error, CheckpointTooNew):
        return "too new"
    return "incomplete" if isinstance(error, CheckpointIncomplete) else "corrupt"


def _added_bytes(disk: FileSystem, checkpoint: Checkpoint, seen: set[tuple[int, int]]) -> int:
    """Bytes of files that are not in `seen`; adds them to it."""
    added = 0
    for entry in checkpoint.manifest.files:
        try:
            status = disk.status(checkpoint.path(entry.path))
        except FileNotFoundError:
            continue
        file = (status.st_dev, status.st_ino)
        added += 0 if file in seen else status.st_size
        seen.add(file)
    return added
