"""Discovery: which checkpoints of a directory are complete, and which is the newest. Changes nothing."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem, is_directory, read_errors
from verl.checkpoint.core.manifest import COMMIT, MANIFEST
from verl.checkpoint.read.reader import Level, open_verified
from verl.errors import BadCheckpoint, CheckpointNotFound, CheckpointTooNew, ConfigError

FORMAT, RUN_LOCK = "format.json", "run.lock"

log = logging.getLogger(__name__)

STAGING, TRASH, PINS, LATEST = "staging", "trash", "pins", "latest"
COLD, UPLOADED, FETCHED = "cold.json", "uploaded", "fetched"
POLICY_RECORD = "policy.json"  # in a run's directory: step, configuration and statistics of the weights in it
STEP = re.compile(r"global_step_\d+(-\d+)?")
RESERVED = {STAGING, TRASH, PINS, LATEST, FORMAT, RUN_LOCK, COLD, UPLOADED, FETCHED}


class CheckpointDirectory:
    """The checkpoints of one directory, for reading; no permission to write is needed.

    >>> CheckpointDirectory("checkpoints").newest().step
    200
    """

    def __init__(self, directory: str | Path, disk: FileSystem | None = None):
        self.directory = Path(directory).absolute()
        self.disk = disk or FileSystem()
        self.disk.contain(self.directory)
        self._said: set[str] = set()

    def complete(self) -> list[Checkpoint]:
        """Every checkpoint that verifies, in order of publication, the newest last; damaged ones are logged.

        The order is that of publication, not of steps: a run that was resumed at step 100 publishes its step 200 after
        the abandoned step 300.
        """
        good, bad = self.survey()
        for error in bad:
            self._say(f"NOT USING checkpoint {error}")
        return good

    def survey(self, level: Level = "quick") -> tuple[list[Checkpoint], list[BadCheckpoint]]:
        """The complete checkpoints in order of publication, and an error for each of the others."""
        good, bad, is_pruned = [], [], False
        with read_errors(f"looking for checkpoints in {self.directory}"):
            for directory in self.candidates():
                try:
                    good.append(open_verified(self.disk, directory, level))
                except BadCheckpoint as error:
                    if self.exists(directory):
                        bad.append(error)
                    else:
                        is_pruned = True  # pruned during the search: newer ones exist
        if is_pruned and not good:
            return self.survey(level)
        return sorted(good, key=lambda checkpoint: (checkpoint.sequence, checkpoint.name)), bad

    def newest(self, is_meant: Callable[[Checkpoint], bool] | None = None) -> Checkpoint:
        """The complete checkpoint that was published last, see `complete`.

        Args:
            is_meant: whether a checkpoint is considered; None considers all.
        Raises:
            CheckpointNotFound: no checkpoint is complete.
            CheckpointTooNew: a later version of verl saved here; no older checkpoint is used instead.
        """
        good, bad = self.survey()
        for error in bad:
            if isinstance(error, CheckpointTooNew):
                raise error
            self._say(f"NOT USING checkpoint {error}")
        meant = [checkpoint for checkpoint in good if is_meant is None or is_meant(checkpoint)]
        if not meant:
            raise CheckpointNotFound(f"{self.directory} holds no complete checkpoint")
        return meant[-1]

    def open(self, name: str, level: Level = "quick") -> Checkpoint:
        """The checkpoint of this name; `latest` is the newest complete one, independent of the symbolic link.

        Raises:
            CheckpointNotFound: no checkpoint has this name.
            BadCheckpoint: it does not verify.
        """
        if name == LATEST:
            name = self.newest().name
        with read_errors(f"opening checkpoint {name}"):
            if not is_directory(self.disk, self.directory / name):
                raise CheckpointNotFound(f"{self.directory} has no checkpoint {name}")
            return open_verified(self.disk, self.directory / name, level)

    def candidates(self) -> list[Path]:
        """Directories of checkpoints, complete or not."""
        try:
            names = self.disk.names(self.directory)
        except FileNotFoundError:
            return []
        directories = [self.directory / name for name in names if name not in RESERVED and not name.startswith(".")]
        return [path for path in directories if self.is_candidate(path)]

    def is_candidate(self, path: Path) -> bool:
        """Whether a directory is a checkpoint, complete or not; so is a link in its place, which is not followed."""
        try:
            if not is_directory(self.disk, path):
                return STEP.fullmatch(path.name) is not None and self.exists(path)
            return path.name.startswith("global_step_") or any(self.exists(path / name) for name in (COMMIT, MANIFEST))
        except OSError:
            return True  # the fault is reported when it is opened

    def exists(self, path: Path) -> bool:
        """Whether anything of this name exists, including a dangling symbolic link."""
        try:
            self.disk.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _say(self, sentence: str) -> None:
        """Log an error, once per message."""
        if sentence not in self._said:
            self._said.add(sentence)
            log.error(sentence)


OWN_DIRECTORIES = (STAGING, TRASH, PINS, UPLOADED)


def refuse_inside(path: Path, what: str) -> None:
    """Refuse an output path that is or is inside a checkpoint, or is among a store's own files.

    Args:
        path: the output path; symbolic links are followed.
        what: name of the argument, for the message, such as `OUT`.
    Raises:
        ConfigError: the path is or is inside one.
    """
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        named = place.name.startswith("global_step_") and ((place / COMMIT).exists() or (place / MANIFEST).exists())
        if named or ((place / COMMIT).is_file() and (place / MANIFEST).is_file()):
            reason = f"it is inside the checkpoint {place}, which is never changed"
        elif place.name in OWN_DIRECTORIES and (place.parent / FORMAT).is_file():
            reason = f"{place} is the store's own, which it cleans"
        else:
            continue
        raise ConfigError(f"{what} is {str(path)!r}: {reason}. Give a directory elsewhere.")
