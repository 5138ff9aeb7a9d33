"""A save in progress: writers write below `staging/`, and one commit verifies it all and makes it visible by one
rename.

1  space checked, staging directory made         CheckpointStore.begin
2  files written, hashed and synced              RankWriter, in any number of threads and processes
3  reports joined, sizes and tiling checked      SaveTransaction.commit, from here on
4  lock; claim still ours?                       a fenced trainer ends here
5  trainer_state.json, manifest.json, COMMIT     each written aside, synced, renamed; after a kill from here on the
                                                 next attempt goes on here. Reports removed; directories synced
6  rename to global_step_N; both parents synced  only now is it saved
7  `latest`                                      a convenience: what fails here is logged

`CheckpointStore` begins and commits saves in one directory, and removes leftovers of interrupted saves.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import verl
from verl.checkpoint import ownership
from verl.checkpoint.commit.rank_writer import RankReport, RankWriter
from verl.checkpoint.commit.upload_state import read_upload_target
from verl.checkpoint.core.checkpoint import Checkpoint, open_checkpoint
from verl.checkpoint.core.filesystem import (
    FileHandle,
    FileSystem,
    files_below,
    is_directory,
    remove_tree,
    write_by_rename,
    write_errors,
    write_file,
)
from verl.checkpoint.core.hashing import Leaf, digest_of
from verl.checkpoint.core.manifest import (
    COMMIT,
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    FileEntry,
    Manifest,
    commit_line,
    content_digest,
    join_tensors,
    utc_now,
)
from verl.checkpoint.read.discovery import (
    FORMAT,
    LATEST,
    RESERVED,
    STAGING,
    TRASH,
    CheckpointDirectory,
    refuse_inside,
)
from verl.checkpoint.read.reader import open_verified
from verl.errors import (
    BadCheckpoint,
    CheckpointIncomplete,
    CheckpointTooNew,
    ConfigError,
    FileFault,
    NoSpaceForCheckpoint,
)
from verl.utils.external_input import NAME, checked_name, plain

log = logging.getLogger(__name__)

MAIN = "main"
REPORTS = "reports"  # below a staging directory: what the others wrote, until the save is published
OWN_FILES, OWN_BYTES = 16, 2**20  # of the store itself: manifest, commit, state, directories


class SaveTransaction:
    """A save that is not published yet. Leaving its `with` block without `commit` removes it.

    >>> with store.begin(step=100) as transaction:
    ...     written = transaction.main.write("actor/config.json", [b"{}"])
    ...     checkpoint = transaction.commit(state={"epoch": 1}, metrics={"reward/mean": 0.8})

    Attributes:
        directory: where participants write.
        main: the participant of the process that commits.
    """

    def __init__(
        self,
        store: CheckpointStore,
        directory: Path,
        step: int,
        tag: str | None,
        rank_names: Sequence[str],
        staging_lock: FileHandle | None,
    ):
        self.directory, self.step, self.tag = directory, step, tag
        self.main = RankWriter(directory, MAIN, store.disk)
        self._store, self._disk = store, store.disk
        self._expected = {MAIN, *rank_names}
        self._staging_lock = staging_lock
        self._is_open = True

    def commit(
        self,
        reports: Iterable[RankReport] = (),
        state: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Checkpoint:
        """Check everything and publish it. When this returns, the checkpoint survives a power cut.

        If the newest checkpoint has the same step, tag and content, it is returned instead.

        Args:
            reports: of all participants but `main`.
            state: written to `trainer_state.json`, with the store's own fields.
            metrics: at this step, for `keep_best`.
        Raises:
            CheckpointIncomplete: a participant is missing, or slices do not tile a tensor.
            CheckpointCorrupt: the recorded tensors do not match the files.
            CheckpointFenced: another trainer has taken over.
            CheckpointWriteFailed: the file system refused.
        """
        assert self._is_open, "a save is committed once"
        try:
            manifest = self._joined([self.main.report(), *reports], metrics or {})
            with self._store.locked(), write_errors(f"publishing step {self.step}"):
                self._store.check_claim()
                return self.publish(manifest, state or {})
        finally:
            self.abort()  # after a publication there is nothing left to remove

    def finish_commit(self) -> Checkpoint | None:
        """Finish the commit of a process that was killed during it; returns None if there is no such commit.

        If `COMMIT` exists, everything is complete and only the rename is missing.

        Raises:
            CheckpointIncomplete: the directory is gone and its content was not published.
            CheckpointFenced, CheckpointWriteFailed: as in `commit`.
        """
        assert self._is_open, "a save is committed once"
        with self._store.locked(), write_errors(f"publishing step {self.step}"):
            self._store.check_claim()
            try:
                names = self._disk.names(self.directory)
            except FileNotFoundError:
                newest, _ = self._store.newest_and_next_sequence()
                identity = (self.step, self.tag, self._store.run_id)
                if newest is None or (newest.manifest.step, newest.manifest.tag, newest.manifest.run_id) != identity:
                    raise CheckpointIncomplete(self.directory, [FileFault(MANIFEST, "the directory is gone")]) from None
                self._store.point_latest(newest.name)
                return newest
            if COMMIT not in names:
                return None
            return self.rename(open_checkpoint(self._disk, self.directory).manifest)

    def abort(self) -> None:
        """Remove everything that was written. No effect after a commit or a second call."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            remove_tree(self._disk, self.directory)
        except OSError as error:
            log.warning("%s could not be removed (%s); the next run will", self.directory, error)
        if self._staging_lock is not None:
            with contextlib.suppress(OSError):
                self._disk.close(self._staging_lock)

    def __enter__(self) -> SaveTransaction:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _joined(self, reports: list[RankReport], metrics: dict[str, float]) -> Manifest:
        """The manifest from all reports, after checking them against the files; sequence number and time are set
        later."""
        entries = {entry.path: entry for report in reports for entry in report.files}
        with write_errors("looking at what was written"):
            written, _ = files_below(self._disk, self.directory)
        sizes = {path: size for path, size in written.items() if not path.startswith(f"{REPORTS}/")}
        tensors, contradictions = join_tensors(tensor for report in reports for tensor in report.tensors)
        faults = [
            *_faults_of_participants(self._expected, reports),
            *_faults_of_files(sizes, entries),
            *(FileFault(MANIFEST, contradiction) for contradiction in contradictions),
            *(FileFault(MANIFEST, fault, (tensor.full_name,)) for tensor in tensors for fault in tensor.faults()),
        ]
        if faults:
            raise CheckpointIncomplete(self.directory, faults)
        return Manifest(
            sequence=0, step=self.step, tag=self.tag, run_id=self._store.run_id, saved_at=utc_now(),
            verl_version=verl.__version__, metrics={k: float(v) for k, v in metrics.items() if math.isfinite(v)},
            files=tuple(entries[path] for path in sorted(entries)), tensors=tuple(tensors),
        )  # fmt: skip

    def publish(self, manifest: Manifest, state: dict[str, Any]) -> Checkpoint:
        """Rename the finished directory into place; a save equal to the newest checkpoint is not published again."""
        newest, sequence = self._store.newest_and_next_sequence()
        checksum = content_digest(manifest)
        is_same = newest is not None and (newest.step, newest.manifest.tag) == (manifest.step, manifest.tag)
        if newest is not None and is_same and content_digest(newest.manifest) == checksum:
            with contextlib.suppress(BadCheckpoint):
                newest = open_verified(self._disk, newest.directory, "full")  # a damaged one is no reason not to save
                self._disk.sync_directory(newest.directory.parent)  # its own save may have failed at this very call
                self._store.point_latest(newest.name)
                return newest
        manifest = self._with_state(manifest, sequence, checksum, state)
        data = manifest.to_bytes()
        write_by_rename(self._disk, self.directory / MANIFEST, data)
        write_by_rename(self._disk, self.directory / COMMIT, commit_line(data))  # still below staging/: not visible yet
        return self.rename(manifest)

    def rename(self, manifest: Manifest, name: str | None = None) -> Checkpoint:
        """Rename a complete staging directory, with `COMMIT`, to its final name. The lock of the store must be held."""
        remove_tree(self._disk, self.directory / REPORTS)  # last: recovery after a kill needs them
        open_verified(self._disk, self.directory)  # nothing is published that discovery would refuse
        for directory in files_below(self._disk, self.directory)[1]:
            self._disk.sync_directory(directory)
        target = self._store.rename_into_place(self.directory, name or self.tag or f"global_step_{self.step}")
        self._disk.sync_directory(self.directory.parent)
        self._disk.sync_directory(target.parent)
        self._store.point_latest(target.name)
        return Checkpoint(target, manifest)

    def _with_state(self, manifest: Manifest, sequence: int, checksum: str, state: dict[str, Any]) -> Manifest:
        fields = {
            "checkpoint_version": FORMAT_VERSION,
            "verl_version": manifest.verl_version,
            "step": self.step,
            "tag": self.tag,
            "sequence": sequence,
            "run_id": manifest.run_id,
            "saved_at": manifest.saved_at,
            "metrics": manifest.metrics,
            "manifest_checksum": checksum,
        }
        text = json.dumps({**fields, **plain(state), **fields}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        data = text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its JSON escape
        write_by_rename(self._disk, self.directory / STATE, data)
        entry = FileEntry.of(STATE, [Leaf(len(data), digest_of(data))])
        files = tuple(sorted((*manifest.files, entry), key=lambda e: e.path))
        return replace(manifest, sequence=sequence, files=files)


def _faults_of_participants(expected: set[str], reports: list[RankReport]) -> Iterator[FileFault]:
    arrived = [report.name for report in reports]
    yield from (FileFault(MANIFEST, f"participant {name} did not report") for name in sorted(expected - {*arrived}))
    if len(arrived) > len(expected):
        yield FileFault(MANIFEST, f"participants {sorted(arrived)} report, and {sorted(expected)} were expected")
    paths = Counter(entry.path for report in reports for entry in report.files)
    yield from (FileFault(path, "two participants report it") for path, n in paths.items() if n > 1)


def _faults_of_files(sizes: dict[str, int], entries: dict[str, FileEntry]) -> Iterator[FileFault]:
    for path in sorted(sizes.keys() | entries.keys()):
        if path not in sizes:
            yield FileFault(path, "it is missing")
        elif path not in entries:
            yield FileFault(path, "no participant reports it")
        elif sizes[path] != entries[path].size:
            yield FileFault(path, f"it has {sizes[path]} bytes instead of {entries[path].size}")


class CheckpointStore(CheckpointDirectory):
    """Checkpoints of one directory. A pickled copy, in another process of the run, shares the claim.

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

    def __init__(
        self, directory: str | Path, run_id: str = "", disk: FileSystem | None = None, claim: str | None = None
    ):
        super().__init__(directory, disk)
        self.run_id, self.claim, self._highest_sequence = run_id, claim, 0

    # -- ownership -----------------------------------------------------------------------------------------------------

    def claim_directory(self) -> str:
        """Become the owner of the directory and fence out the previous one. Called automatically at the first save.

        Returns:
            The claim, for other processes of the same run.
        """
        if self.claim is None:
            with write_errors(f"preparing {self.directory}"):
                self._prepare()
                with self.locked():
                    self.claim = ownership.claim_directory(self.directory, self.run_id)
        return self.claim

    def borrow_claim(self) -> None:
        """Use the claim of the directory's current owner, if any: for maintenance that must not fence out a running
        trainer."""
        self.claim = ownership.read_owner(self.directory).claim or None

    def check_claim(self) -> None:
        """Check that the claim is still valid. The lock must be held.

        Raises:
            CheckpointFenced: another trainer has claimed the directory since.
        """
        assert self.claim is not None, "a claim is checked after it was taken"
        ownership.check_claim(self.directory, self.claim)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process that publishes or prunes here; `format.json` is locked, which is never replaced.

        Raises:
            CheckpointWriteFailed: another process held the lock for too long.
        """
        with write_errors("locking the directory of checkpoints"):
            handle = ownership.wait_for_lock(self.disk, self.directory / FORMAT)
        try:
            yield
        finally:
            if handle is not None:
                with contextlib.suppress(OSError):  # the lock is gone all the same
                    self.disk.close(handle)

    def newest_and_next_sequence(self) -> tuple[Checkpoint | None, int]:
        """The last published checkpoint whose manifest can be read, and the number of the next publication, above all
        that the store behind has.

        Raises:
            CheckpointTooNew: a later version of verl saves here.
        """
        opened = []
        for directory in self.candidates():
            try:
                opened.append(open_checkpoint(self.disk, directory))
            except CheckpointTooNew:
                raise
            except BadCheckpoint as error:
                self._say(f"NOT USING checkpoint {error}")
        newest = max(opened, key=lambda checkpoint: checkpoint.sequence, default=None)
        cold = read_upload_target(self.disk, self.directory)
        # Remembered, too: a manifest that cannot be read just now may be read again later.
        numbers = (self._highest_sequence, newest.sequence if newest else 0, cold.sequence_floor if cold else 0)
        self._highest_sequence = max(numbers)
        return newest, self._highest_sequence + 1

    def rename_into_place(self, staged: Path, name: str) -> Path:
        """Publish the checkpoint by one rename. A name in use gets a suffix."""
        checked_name(name, RESERVED)
        for number in itertools.count(1):
            target = self.directory / (name if number == 1 else f"{name}-{number}")
            if self.exists(target):
                continue
            try:
                self.disk.rename(staged, target)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    continue
                raise
            return target
        raise AssertionError("there is always another number")

    def point_latest(self, name: str) -> None:
        """Update the symbolic link `latest`, which is informative only."""
        temporary = self.directory / STAGING / f"latest-{secrets.token_hex(6)}"
        try:
            self.disk.symlink(name, temporary)
            self.disk.rename(temporary, self.directory / LATEST)
        except OSError as error:
            log.warning("%s does not point to %s: %s", self.directory / LATEST, name, error)

    # -- saving --------------------------------------------------------------------------------------------------------

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
        if tag is not None and (
            not isinstance(tag, str) or not NAME.fullmatch(tag) or tag in RESERVED or tag.startswith("global_step_")
        ):
            raise ConfigError(
                f"tag is {tag!r}: it names a directory. Use letters, digits and . _ = + -, and none of the store's own "
                f"names ({', '.join(sorted(RESERVED))}, global_step_...)."
            )
        assert step >= 0, step
        self.claim_directory()
        with write_errors(f"preparing {self.directory}", "What lay there may be gone"):
            if not (self.exists(self.directory / FORMAT) and self.exists(self.directory / STAGING)):
                log.error("%s WAS REMOVED, with what lay there, and was created again", self.directory)
                self._prepare()
        self._check_space(needed_bytes, needed_files)
        directory = self.directory / STAGING / f"{step}-{secrets.token_hex(6)}"
        with write_errors(f"beginning the save of step {step}"), self.locked():
            self.check_claim()
            try:
                for path in self.leftovers():
                    remove_tree(self.disk, path)
            except OSError as error:  # they take space and do no harm
                log.warning("leftovers of earlier saves could not be removed: %s", error)
            self.disk.make_directory(directory)
            self.disk.sync_directory(directory.parent)
            lock = None
            with contextlib.suppress(OSError):  # by the lock, others see that the save is not abandoned
                lock = self.disk.lock(directory)
        return SaveTransaction(self, directory, step, tag, rank_names, lock)

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
        with contextlib.suppress(FileExistsError):  # never replaced, since processes lock its inode; nobody reads it
            write_file(self.disk, self.directory / FORMAT, [json.dumps(form, indent=2).encode() + b"\n"])
        self.disk.sync_directory(self.directory)

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
