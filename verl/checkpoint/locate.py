"""Which checkpoint a path means: a directory of checkpoints, one of them, `latest`, or a run that has some."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.discovery import LATEST, CheckpointDirectory
from verl.checkpoint.disk import Disk
from verl.checkpoint.files import is_directory, read_errors
from verl.checkpoint.ownership import FORMAT
from verl.errors import CheckpointNotFound
from verl.storage.config import is_address

OF_A_RUN = "checkpoints"
POINTER = "checkpoints.json"  # in a run's directory: where it saves (`save_dir`), and under which `run_id`
POINTER_LIMIT_BYTES = 65_536
PULL_FIRST = "this works on a disk. Fetch it with `verl checkpoint pull {} DIR`, and give DIR"


@dataclass(frozen=True)
class Location:
    """Where a path leads.

    Args:
        directory: of checkpoints.
        name: of one in it, or `latest`; None where the path means all of them.
    """

    directory: Path
    name: str | None = None


def locate(path: str | Path, disk: Disk | None = None) -> Location:
    """Find out what a path means. It may be relative, end in a slash, and lead through symbolic links.

    `latest` is the newest complete checkpoint, whatever the symbolic link of this name says.

    >>> locate("checkpoints/latest/")  # doctest: +SKIP
    Location(directory=PosixPath('/home/me/checkpoints'), name='latest')

    Raises:
        CheckpointNotFound: there are no checkpoints, or they are in object storage.
        CheckpointReadFailed: the file system refused.
    """
    if is_address(str(path)):
        raise CheckpointNotFound(f"{path} lies in object storage: {PULL_FIRST.format(path)}")
    disk = disk or Disk()
    given = Path(path).expanduser().absolute()
    with read_errors(f"looking at {path}"):
        if given.name == LATEST and _holds_checkpoints(disk, given.parent):
            return Location(given.parent, LATEST)
        real = Path(os.path.realpath(given))
        beside = CheckpointDirectory(real.parent, disk)
        if beside.exists(real) and beside.is_candidate(real):
            return Location(real.parent, real.name)
        for directory in (real, real / OF_A_RUN, *_pointed_to(disk, real)):
            if _holds_checkpoints(disk, directory):
                return Location(directory)
        raise CheckpointNotFound(f"{path} {_instead(disk, given, real)}")


def _pointed_to(disk: Disk, run: Path) -> list[Path]:
    """Where a run says that it saves."""
    try:
        return [Path(json.loads(disk.read(run / POINTER, POINTER_LIMIT_BYTES))["save_dir"])]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return []


def _holds_checkpoints(disk: Disk, directory: Path) -> bool:
    try:
        own = CheckpointDirectory(directory, disk)
        return own.exists(directory / FORMAT) or bool(own.candidates())
    except NotADirectoryError:
        return False


def _instead(disk: Disk, given: Path, real: Path) -> str:
    """What is there, and what to give."""
    if given.is_symlink() and not real.exists():
        return f"is a symbolic link to {os.readlink(given)}, which does not exist"
    if not CheckpointDirectory(real.parent, disk).exists(real):
        return "does not exist"
    for parent in real.parents:
        if CheckpointDirectory(parent.parent, disk).is_candidate(parent):
            return f"lies inside the checkpoint {parent}: give that directory"
    if not is_directory(disk, real):
        return "is a file: give a directory of checkpoints, or one checkpoint"
    if below := _below(disk, real / OF_A_RUN, levels=2) or _below(disk, real, levels=2):
        return f"holds no checkpoints itself: did you mean {' or '.join(map(str, below[:3]))}?"
    return "holds no checkpoints: give a directory of checkpoints, one of them, or a run that saved some"


def _below(disk: Disk, directory: Path, levels: int) -> list[Path]:
    """Directories of checkpoints below this one, as far as one may look."""
    try:
        inside = [directory / name for name in disk.names(directory) if is_directory(disk, directory / name)]
        found = [path for path in inside if _holds_checkpoints(disk, path)]
    except OSError:
        return []
    if found or levels == 1:
        return found
    return [path for below in inside for path in _below(disk, below, levels - 1)]
