"""Is there a checkpoint to go on from? Answered from one manifest where all is well, for probes that ask often."""

from __future__ import annotations

import math
import re
from pathlib import Path

from verl.checkpoint.discovery import LATEST, CheckpointDirectory
from verl.checkpoint.disk import Disk
from verl.checkpoint.files import read_errors
from verl.checkpoint.locate import Location
from verl.checkpoint.manifest import MANIFEST, is_readable
from verl.checkpoint.published import Published
from verl.checkpoint.verify import verified
from verl.errors import BadCheckpoint, CheckpointTooNew

HEAD_BYTES = 512
HEAD = re.compile(rb'"format":.*?"version": ?"(\d+\.\d+)[^"]*".*?"sequence": ?(\d+)', re.DOTALL)


def newest_complete(where: Location, disk: Disk | None = None) -> tuple[Published | None, list[BadCheckpoint]]:
    """The complete checkpoint that was published last, and the bad ones that were passed over on the way to it.

    Raises:
        CheckpointTooNew: a later version of verl saved here; a run would refuse, too.
    """
    directory = CheckpointDirectory(where.directory, disk)
    passed_over: list[BadCheckpoint] = []
    with read_errors(f"looking for checkpoints in {where.directory}"):
        candidates = directory.candidates() if where.name in (None, LATEST) else [where.directory / where.name]
        for path in sorted(candidates, key=lambda path: _order(directory, path), reverse=True):
            try:
                return verified(directory.disk, path), passed_over
            except CheckpointTooNew:
                raise
            except BadCheckpoint as error:
                if directory.exists(path):  # else it was pruned meanwhile
                    passed_over.append(error)
    return None, passed_over


def _order(directory: CheckpointDirectory, path: Path) -> float:
    """The number of publication that the manifest claims; what cannot be read so easily is looked at first."""
    try:
        head = HEAD.search(directory.disk.read_range(path / MANIFEST, 0, HEAD_BYTES))
    except OSError:
        return math.inf
    if head is None or not is_readable(head[1].decode()):
        return math.inf
    return int(head[2])
