"""CheckpointStore: begins and commits saves in one directory, and removes leftovers of interrupted saves."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from verl.checkpoint.commit.fencing import WriterLease
from verl.checkpoint.commit.rank_writer import DedupIndex
from verl.checkpoint.commit.transaction import SaveTransaction
from verl.checkpoint.commit.upload_state import read_upload_target
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import (
    NO_LINK,
    FileHandle,
    FileSystem,
    is_directory,
    readable_size,
    remove_content,
    remove_tree,
    write_errors,
    write_file,
)
from verl.checkpoint.core.manifest import FORMAT_NAME, FORMAT_VERSION
from verl.checkpoint.read.discovery import (
    FORMAT,
    LATEST,
    RESERVED,
    STAGING,
    TAG,
    TRASH,
    CheckpointDirectory,
    refuse_inside,
)
from verl.errors import ConfigError, NoSpaceForCheckpoint
from verl.utils.external_input import checked_name

log = logging.getLogger(__name__)

OWN_FILES, OWN_BYTES = 16, 2**20  # of the store itself: manifest, commit, state, directories


class CheckpointStore(CheckpointDirectory):
    """Checkpoints of one directory.

    Reading (`complete`, `newest`, `open`) changes nothing and needs no write permission. The first `begin` claims the
    directory and fences out the previous owner.

    >>> store = CheckpointStore("checkpoints", run_id="x7f3")
    >>> with store.begin(step=100, needed_bytes=10**9) as staging:
    ...     written = staging.main.write("actor/config.json", [b"{}"])
    ...     published = staging.commit(state={"epoch": 1})
    >>> store.newest().step
    100

    Args:
        directory: created when the first save begins.
        run_id: recorded in every checkpoint.
        claim: result of `claim_directory` in another process of this run, to save concurrently with it.
    """

    def __init__(
        self, directory: str | Path, run_id: str = "", disk: FileSystem | None = None, claim: str | None = None
    ):
        super().__init__(directory, disk)
        self.run_id = run_id
        self.ownership = WriterLease(self.disk, self.directory, run_id, claim)
        self.objects = DedupIndex(self.disk, self.directory)

    # -- saving ------------------------------------------------------------------------------------------------------

    def claim_directory(self) -> str:
        """Become the owner of the directory and fence out the previous one. Called automatically at the first save.

        Returns:
            The claim, for other processes of the same run.
        """
        if self.ownership.claim is None:
            with write_errors(f"preparing {self.directory}"):
                self._prepare()
                with self.ownership.locked():
                    return self.ownership.take()
        return self.ownership.claim

    def begin(
        self,
        step: int,
        tag: str | None = None,
        needed_bytes: int = 0,
        needed_files: int = 0,
        participants: Sequence[str] = (),
    ) -> SaveTransaction:
        """Begin a save.

        Args:
            step: training steps done.
            tag: name of the directory, instead of `global_step_N`.
            needed_bytes, needed_files: size of the save without linked files; refused if more than is free.
            participants: names of all writers besides `main`; the commit is refused if a report is missing.
        Raises:
            ConfigError: the tag is not a valid directory name.
            NoSpaceForCheckpoint: too little is free.
            CheckpointFenced: another trainer has taken over.
            CheckpointWriteFailed: the directory cannot be written.
        """
        if tag is not None and (not TAG.fullmatch(tag) or tag in RESERVED or tag.startswith("global_step_")):
            raise ConfigError(
                f"tag is {tag!r}: it names a directory. Use letters, digits and . _ = + -, and none of the store's own "
                f"names ({', '.join(sorted(RESERVED))}, global_step_...)."
            )
        assert step >= 0, step
        self.claim_directory()
        with write_errors(f"looking at {self.directory}"):
            is_there = self.exists(self.directory / FORMAT) and self.exists(self.directory / STAGING)
        if not is_there:
            log.error("%s WAS REMOVED, with what lay there, and was created again", self.directory)
            with write_errors(f"making {self.directory} again", "What lay there is gone"):
                self._prepare()
        self._check_space(needed_bytes, needed_files)
        directory = self.directory / STAGING / f"{step}-{secrets.token_hex(6)}"
        with write_errors(f"beginning the save of step {step}"), self.ownership.locked():
            self.ownership.check()
            self._try_to_remove_leftovers()
            self.disk.make_directory(directory)
            self.disk.sync_directory(directory.parent)
            lease = self._lease(directory)
        return SaveTransaction(self, directory, step, tag, participants, lease)

    def newest_and_next_sequence(self) -> tuple[Checkpoint | None, int]:
        """The last published checkpoint and the number of the next one, above all that the store behind has."""
        newest, following = super().newest_and_next_sequence()
        cold = read_upload_target(self.disk, self.directory)
        return newest, max(following, 1 + (cold.sequence_floor if cold else 0))

    # -- for SaveTransaction and retention, with the lock held ------------------------------------------------------

    def rename_into_place(self, staged: Path, name: str) -> Path:
        """Publish the checkpoint by one rename. A name in use gets a suffix."""
        checked_name(name, RESERVED)
        number = 1
        while True:
            target = self.directory / (name if number == 1 else f"{name}-{number}")
            number += 1
            if self.exists(target):
                continue
            try:
                self.disk.rename(staged, target)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    continue
                raise
            return target

    def point_latest(self, name: str) -> None:
        """Update the symbolic link `latest`, which is informative only."""
        temporary = self.directory / STAGING / f"latest-{secrets.token_hex(6)}"
        try:
            self.disk.symlink(name, temporary)
            self.disk.rename(temporary, self.directory / LATEST)
        except OSError as error:
            log.warning("%s does not point to %s: %s", self.directory / LATEST, name, error)

    def remove_leftovers(self) -> int:
        """Remove everything in `staging/` and `trash/` that no running process writes. Returns the bytes freed.

        Raises:
            CheckpointFenced: another trainer has taken over.
        """
        self.claim_directory()
        with self.ownership.locked(), write_errors("removing leftovers"):
            self.ownership.check()
            return self._remove_leftovers()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        refuse_inside(self.directory, "a directory for checkpoints")
        missing = [path for path in (self.directory, *self.directory.parents) if not self.exists(path)]
        for path in (*reversed(missing or [self.directory]), self.directory / STAGING):
            with contextlib.suppress(FileExistsError):
                self.disk.make_directory(path)
            # Even if it existed: its creator may have been killed before this line.
            with contextlib.suppress(PermissionError):
                self.disk.sync_directory(path.parent)
        if self.exists(self.directory / FORMAT):
            return
        form = {"name": FORMAT_NAME, "version": FORMAT_VERSION, "run_id": self.run_id, "created_at": time.time()}
        temporary = self.directory / STAGING / f"format-{secrets.token_hex(6)}"
        write_file(self.disk, temporary, [json.dumps(form, indent=2).encode() + b"\n"])
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process was first, and cleaned up
            self._place_once(temporary, self.directory / FORMAT)
        self.disk.sync_directory(self.directory)

    def _place_once(self, temporary: Path, target: Path) -> None:
        """Rename a finished file unless another process created it first; processes lock the file's inode."""
        try:
            self.disk.link(temporary, target)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            self.disk.rename(temporary, target)
            return
        self.disk.unlink(temporary)

    def _check_space(self, needed_bytes: int, needed_files: int) -> None:
        with write_errors("looking for free space"):
            space = self.disk.space(self.directory)
        if space.bytes < needed_bytes + OWN_BYTES:
            raise NoSpaceForCheckpoint(
                f"{self.directory} has {readable_size(space.bytes)} free and the save needs "
                f"{readable_size(needed_bytes + OWN_BYTES)}; nothing was written. Free some, or lower "
                "checkpoint.keep_last_n"
            )
        if space.inodes is not None and space.inodes < needed_files + OWN_FILES:
            raise NoSpaceForCheckpoint(
                f"{self.directory} has {space.inodes} inodes free and the save needs {needed_files + OWN_FILES}; "
                "nothing was written. Remove files there"
            )

    def _lease(self, directory: Path) -> FileHandle | None:
        """A lock on a staging directory, released when the process ends, so that others can detect abandoned saves."""
        with contextlib.suppress(OSError):
            return self.disk.lock(directory)
        return None

    def _try_to_remove_leftovers(self) -> None:
        try:
            self._remove_leftovers()
        except OSError as error:  # they take space and do no harm
            log.warning("leftovers of earlier saves could not be removed: %s", error)

    def _remove_leftovers(self) -> int:
        freed = 0
        for name in self.disk.names(self.directory / STAGING):
            path = self.directory / STAGING / name
            if not is_directory(self.disk, path):
                freed += remove_tree(self.disk, path)
                continue
            try:
                lease = self.disk.lock(path)
            except OSError:  # no locks here: what may be alive is left alone
                continue
            if lease is None:
                continue
            try:
                freed += remove_tree(self.disk, path)
            finally:
                with contextlib.suppress(OSError):
                    self.disk.close(lease)
        return freed + remove_content(self.disk, self.directory / TRASH)
