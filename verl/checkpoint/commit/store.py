"""CheckpointStore: begins and commits saves in one directory, and removes leftovers of interrupted saves."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint.commit.fencing import ClaimedDirectory
from verl.checkpoint.commit.transaction import SaveTransaction
from verl.checkpoint.core.filesystem import (
    FileSystem,
    is_directory,
    remove_tree,
    write_errors,
)
from verl.checkpoint.read.discovery import FORMAT, RESERVED, STAGING, TAG, TRASH
from verl.errors import ConfigError, NoSpaceForCheckpoint

log = logging.getLogger(__name__)

OWN_FILES, OWN_BYTES = 16, 2**20  # of the store itself: manifest, commit, state, directories


class CheckpointStore(ClaimedDirectory):
    """Checkpoints of one directory.

    Reading (`complete`, `newest`, `open`) changes nothing and needs no write permission. The first `begin` claims the
    directory and fences out the previous owner.

    >>> store = CheckpointStore("checkpoints", run_id="x7f3")
    >>> with store.begin(step=100, needed_bytes=10**9) as transaction:
    ...     written = transaction.main.write("actor/config.json", [b"{}"])
    ...     checkpoint = transaction.commit(state={"epoch": 1})
    >>> store.newest().step
    100

    Args:
        directory: created when the first save begins.
        run_id: recorded in every checkpoint.
        claim: result of `claim_directory` in another process of this run, to save concurrently with it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process of this run has a file system of the same class and shares the claim."""
        return _copy_of, (type(self), self.directory, self.run_id, type(self.disk), self.claim)

    def begin(
        self,
        step: int,
        tag: str | None = None,
        needed_bytes: int = 0,
        needed_files: int = 0,
        rank_names: Sequence[str] = (),
    ) -> SaveTransaction:
        """Begin a save.

        Args:
            step: training steps done.
            tag: name of the directory, instead of `global_step_N`.
            needed_bytes, needed_files: size of the save without linked files; refused if more than is free.
            rank_names: names of all writers besides `main`; the commit is refused if a report is missing.
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
        with write_errors(f"beginning the save of step {step}"), self.locked():
            self.check_claim()
            try:
                self._remove_leftovers()
            except OSError as error:  # they take space and do no harm
                log.warning("leftovers of earlier saves could not be removed: %s", error)
            self.disk.make_directory(directory)
            self.disk.sync_directory(directory.parent)
            lock = None
            with contextlib.suppress(OSError):  # by the lock, others see that the save is not abandoned
                lock = self.disk.lock(directory)
        return SaveTransaction(self, directory, step, tag, rank_names, lock)

    def remove_leftovers(self) -> int:
        """Remove everything in `staging/` and `trash/` that no running process writes. Returns the bytes freed.

        Raises:
            CheckpointFenced: another trainer has taken over.
        """
        self.claim_directory()
        with self.locked(), write_errors("removing leftovers"):
            self.check_claim()
            return self._remove_leftovers()

    def leftovers(self) -> Iterator[Path]:
        """Leftovers of dead processes: the trash, and staged saves without a lock, each locked while it is looked at.

        Under the lock of the store a save is either not begun or has its own lock.
        """
        for part in (STAGING, TRASH):
            inside = self.directory / part
            for path in [inside / name for name in self.disk.names(inside)] if self.exists(inside) else []:
                if part == TRASH or not is_directory(self.disk, path):
                    yield path
                    continue
                try:
                    lock = self.disk.lock(path)
                except OSError:  # no locks here: what may be alive is left alone
                    continue
                if lock is not None:
                    try:
                        yield path
                    finally:
                        with contextlib.suppress(OSError):
                            self.disk.close(lock)

    # -- inside --------------------------------------------------------------------------------------------------------

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

    def _remove_leftovers(self) -> int:
        return sum(remove_tree(self.disk, path) for path in self.leftovers())


def _copy_of(
    kind: type[CheckpointStore], directory: Path, run_id: str, disk_type: type[FileSystem], claim: str | None
) -> CheckpointStore:
    return kind(directory, run_id, disk_type(), claim)


def readable_size(num_bytes: int) -> str:
    """A size in bytes for humans, with at least three digits, so that sizes that differ by a few per cent look
    different.

    >>> readable_size(1_234_567), readable_size(2**40)
    ('1.18 MiB', '1024.00 GiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"
