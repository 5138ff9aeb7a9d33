"""What lies in a directory of checkpoints: which are whole, and which is the newest. Changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from verl.checkpoint.disk import Disk
from verl.checkpoint.files import is_directory, read_errors
from verl.checkpoint.manifest import COMMIT, MANIFEST
from verl.checkpoint.ownership import FORMAT, OWNER
from verl.checkpoint.published import Published, open_published
from verl.checkpoint.verify import Level, verified
from verl.errors import BadCheckpoint, CheckpointNotFound, CheckpointTooNew

log = logging.getLogger(__name__)

STAGING, TRASH, OBJECTS, PINS, LATEST = "staging", "trash", "objects", "pins", "latest"
COLD, UPLOADED, FETCHED = "cold.json", "uploaded", "fetched"
RESERVED = {STAGING, TRASH, OBJECTS, PINS, LATEST, FORMAT, OWNER, COLD, UPLOADED, FETCHED}


class CheckpointDirectory:
    """The checkpoints of one directory, for reading; no permission to write is needed.

    >>> CheckpointDirectory("checkpoints").newest().step  # doctest: +SKIP
    3200
    """

    def __init__(self, directory: str | Path, disk: Disk | None = None):
        self.directory = Path(directory).absolute()
        self.disk = disk or Disk()
        self._said: set[str] = set()
        self._highest_sequence = 0

    def complete(self, strict: bool = False, level: Level = "quick") -> list[Published]:
        """Every checkpoint that verifies, in order of publication, the newest last.

        A run resumed at step 100 publishes its step 200 after the step 300 that it abandoned; so it comes later.

        Args:
            strict: raise at the first bad one, instead of saying so in the log and leaving it out.
        Raises:
            BadCheckpoint: only with `strict`.
        """
        good, bad = self.survey(level)
        if strict and bad:
            raise bad[0]
        for error in bad:
            self._say(f"NOT USING checkpoint {error}")
        return good

    def survey(self, level: Level = "quick") -> tuple[list[Published], list[BadCheckpoint]]:
        """Those that verify, in order of publication, and what is wrong with each of the others."""
        good, bad = [], []
        with read_errors(f"looking for checkpoints in {self.directory}"):
            for directory in self.candidates():
                try:
                    good.append(verified(self.disk, directory, level))
                except BadCheckpoint as error:
                    if self.exists(directory):  # else it was pruned while we looked
                        bad.append(error)
        return sorted(good, key=lambda published: (published.sequence, published.name)), bad

    def newest(self, strict: bool = False) -> Published:
        """The complete checkpoint that was published last.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointTooNew: a later version of verl saved here; an older checkpoint is not taken in its place.
            BadCheckpoint: only with `strict`, if any is bad.
        """
        good, bad = self.survey()
        for error in bad:
            if strict or isinstance(error, CheckpointTooNew):
                raise error
            self._say(f"NOT USING checkpoint {error}")
        if not good:
            raise CheckpointNotFound(f"{self.directory} holds no complete checkpoint")
        return good[-1]

    def open(self, name: str, level: Level = "quick") -> Published:
        """The checkpoint of this name; `latest` is the newest complete one, whatever the symbolic link says.

        Raises:
            CheckpointNotFound: there is none of this name.
            BadCheckpoint: it does not verify.
        """
        if name == LATEST:
            return self.newest()
        with read_errors(f"opening checkpoint {name}"):
            if not is_directory(self.disk, self.directory / name):
                raise CheckpointNotFound(f"{self.directory} has no checkpoint {name}")
            return verified(self.disk, self.directory / name, level)

    def candidates(self) -> list[Path]:
        """Directories that are checkpoints, whole or not."""
        try:
            names = self.disk.names(self.directory)
        except FileNotFoundError:
            return []
        directories = [self.directory / name for name in names if name not in RESERVED and not name.startswith(".")]
        return [path for path in directories if self.is_candidate(path)]

    def newest_and_next_sequence(self) -> tuple[Published | None, int]:
        """The last published checkpoint whose manifest can be read, and the number of the next publication.

        Raises:
            CheckpointTooNew: a later version of verl saves here.
        """
        opened = []
        for directory in self.candidates():
            try:
                opened.append(open_published(self.disk, directory))
            except CheckpointTooNew:
                raise
            except BadCheckpoint as error:
                self._say(f"damaged checkpoint {error}")
        newest = max(opened, key=lambda published: published.sequence, default=None)
        # Remembered, too: a manifest that cannot be read just now may be read again later.
        self._highest_sequence = max(self._highest_sequence, newest.sequence if newest else 0)
        return newest, self._highest_sequence + 1

    def is_candidate(self, path: Path) -> bool:
        """Whether a directory is a checkpoint, whole or not."""
        try:
            if not is_directory(self.disk, path):
                return False
            return path.name.startswith("global_step_") or any(self.exists(path / name) for name in (COMMIT, MANIFEST))
        except OSError:
            return True  # what is wrong there is found, and said, when it is opened

    def exists(self, path: Path) -> bool:
        """Whether there is anything of this name, be it a dangling symbolic link."""
        try:
            self.disk.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _say(self, sentence: str) -> None:
        """Loudly, and once."""
        if sentence not in self._said:
            self._said.add(sentence)
            log.error(sentence)
