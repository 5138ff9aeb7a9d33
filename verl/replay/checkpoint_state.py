"""The replay buffer's state as a checkpoint takes it: files to be linked, and small ones. Imports no Arrow."""

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
    """A file that is not changed any more, and what its pieces hash to."""

    path: Path
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class ReplayState:
    """What a checkpoint holds of a buffer, by file names.

    Attributes:
        files: small ones, as bytes.
        shared: files that lie there and may be linked.
    """

    files: Mapping[str, bytes]
    shared: Mapping[str, SharedShard] = field(default_factory=dict)


def directory_of(settings: TieredReplay, run_dir: Path) -> Path:
    """Where the files of a run's buffer lie. Elsewhere they have a directory of this run alone, since every sweep has a
    job 0, and the run's directory leads there."""
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
    """Remove what an earlier life of the same run left: its rows are in checkpoints, or were drawn after the last."""
    for path in [*directory.glob("rows_*"), *directory.glob("cold/rows_*")]:
        path.unlink(missing_ok=True)
