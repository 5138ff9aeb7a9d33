"""The replay buffer's state for a checkpoint: shard files to link, and small files. Does not import Arrow."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl.checkpoint.core.hashing import Leaf
from verl.replay.config import TieredReplay

COMPONENT, FILE, VERSION = "replay_buffer", "buffer.json", 1


@dataclass(frozen=True)
class SharedShard:
    """An immutable file, with the digests of its pieces."""

    path: Path
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class ReplayState:
    """State of a buffer for a checkpoint, by file name.

    Attributes:
        files: content of small files.
        shared: existing files that may be hard-linked.
    """

    files: Mapping[str, bytes]
    shared: Mapping[str, SharedShard] = field(default_factory=dict)


def directory_of(settings: TieredReplay, run_dir: Path) -> Path:
    """The directory of a run's buffer files. Below `replay.directory` it is unique to the run, and the run directory
    has a link to it.
    """
    within = run_dir / "replay"
    if settings.directory is None:
        return within
    place = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=6).hexdigest()
    directory = Path(settings.directory).resolve() / f"{run_dir.name}-{place}"
    if within.is_symlink():
        within.unlink()
    if not within.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        within.symlink_to(directory)
    return directory


def empty_state(directory: Path) -> None:
    """Remove files of the run before its restart: their rows are in checkpoints, or newer than the last one."""
    for path in [*directory.glob("rows_*"), *directory.glob("cold/rows_*")]:
        path.unlink(missing_ok=True)
