"""Fencing: one trainer at a time writes a directory; a later claim fences the earlier writer out.

run.lock      locked during the lifetime of the run's process, and names the run: an earlier run that is alive is found
              before the later one loads anything
owner.json    the newest claim, which outlives its process: a trainer checks, under a lock and immediately before it
              commits, that the claim is still its own

Two files: a lock belongs to an inode, which must not be replaced; the claim is replaced as a whole, by a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.checkpoint.commit.upload_state import read_upload_target
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import (
    NO_LINK,
    NO_LOCK,
    FileHandle,
    FileSystem,
    write_by_rename,
    write_errors,
    write_file,
)
from verl.checkpoint.core.manifest import FORMAT_NAME, FORMAT_VERSION, utc_now
from verl.checkpoint.read.discovery import (
    FORMAT,
    LATEST,
    OWNER,
    RESERVED,
    RUN_LOCK,
    STAGING,
    CheckpointDirectory,
    refuse_inside,
)
from verl.errors import CheckpointFenced, CheckpointWriteFailed
from verl.utils.external_input import ExternalInputError, checked_name, parse_as, parse_mapping
from verl.utils.orphan_cleanup import process_fields

log = logging.getLogger(__name__)
OWNER_LIMIT_BYTES = 65_536
LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.02
LOCK_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """The run that saves in a directory, from its lock file; missing fields are empty.

    Args:
        started: start time of its process, in clock ticks since boot.
        identity: of its training.
    """

    run_id: str = ""
    host: str = ""
    pid: int = 0
    since: str = ""
    started: str = ""
    identity: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls, run_id: str, identity: Mapping[str, Any] | None = None) -> LockHolder:
        """A run of this process."""
        since, pid = utc_now(), os.getpid()
        started, host = _process_start(pid), socket.gethostname()
        return cls(run_id=run_id, host=host, pid=pid, since=since, started=started, identity=dict(identity or {}))

    def __str__(self) -> str:
        return f"run {self.run_id or '(unknown)'}: process {self.pid} on {self.host or '(unknown)'}, since {self.since}"


class RunLock:
    """Lock of the run that saves in a directory, held from before it loads weights until its process ends.

    The lock of a killed process is released. Within one process a later run takes over the lock of an earlier one,
    which is fenced out at its next commit.

    Args:
        directory: of checkpoints, or of a run; created if missing.
        identity: of the training, which other runs compare with theirs.
        setting: configuration path of the directory, for messages.
    Attributes:
        holder: this run, as written to the lock file.
    """

    _of_this_process: ClassVar[dict[str, RunLock]] = {}

    def __init__(self, directory: Path, run_id: str, identity: Mapping[str, Any], setting: str = "checkpoint.save_dir"):
        self._path, self._setting = directory / RUN_LOCK, setting
        self._new_directories: list[Path] = []
        self._fd: int | None = None
        self._is_held = False  # whether it should be held; the file may be missing
        self.holder = LockHolder.here(run_id, identity)

    def acquire(self) -> LockHolder | None:
        """Take the lock. Returns the holder if that is another process, and None on success.

        Raises:
            CheckpointWriteFailed: the directory cannot be created or written.
        """
        refuse_inside(self._path.parent, self._setting)
        with write_errors(f"claiming {self._path.parent}"):
            parents = (self._path.parent, *self._path.parent.parents)
            self._new_directories += itertools.takewhile(lambda path: not path.exists(), parents)
            key = os.path.realpath(self._path)
            before = self._of_this_process.get(key)
            if before is not None and before.holder.pid == self.holder.pid:  # of a fork, it is the parent's
                self._fd, before._fd, before._is_held = before._fd, None, False
                self._new_directories = before._new_directories
            elif (holder := self._lock()) is not None:
                return holder
            self._of_this_process[key] = self
            assert self._fd is not None
            data = json.dumps(asdict(self.holder)).encode() + b"\n"
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)
        self._is_held = True
        return None

    def renew(self) -> bool:
        """Take the lock again if its file was removed; returns whether it was.

        Raises:
            CheckpointWriteFailed: as in `acquire`; the next call tries again.
        """
        if not self._is_held or (self._fd is not None and self._is_current(self._fd)):
            return False
        self._of_this_process.pop(os.path.realpath(self._path), None)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self.acquire()
        return True

    def release(self) -> None:
        """Release the lock, and remove the directory if it was created for the lock and is empty. Idempotent."""
        self._is_held = False
        if self._fd is None:
            return
        self._of_this_process.pop(os.path.realpath(self._path), None)
        with contextlib.suppress(OSError):
            if self._is_current(self._fd):  # else it was removed, and the file there is another run's
                self._path.unlink()
        os.close(self._fd)
        self._fd = None
        for path in self._new_directories:
            with contextlib.suppress(OSError):
                path.rmdir()

    @classmethod
    def is_held_here(cls, directory: Path) -> bool:
        """Whether a run of this process holds the lock."""
        lock = cls._of_this_process.get(os.path.realpath(directory / RUN_LOCK))
        return lock is not None and lock.holder.pid == os.getpid()

    @classmethod
    def holder_of(cls, directory: Path) -> LockHolder | None:
        """The other process that holds the lock of a directory, if any; does not take the lock."""
        if os.path.realpath(directory / RUN_LOCK) in cls._of_this_process:
            return None
        try:
            fd = os.open(directory / RUN_LOCK, OPEN_LOCK)
        except OSError:
            return None
        try:
            return _flock(fd, directory)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _lock(self) -> LockHolder | None:
        for attempt in itertools.count(1):
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(self._path, OPEN_LOCK | os.O_CREAT, 0o644)
            except FileNotFoundError:
                if attempt < LOCK_ATTEMPTS:  # a run that has ended removed the directory that it had made
                    continue
                raise
            try:
                holder = _flock(fd, self._path.parent)
            except BaseException:
                os.close(fd)
                raise
            if holder is None and self._is_current(fd):
                self._fd = fd
                return None
            os.close(fd)
            if holder is not None:
                return holder  # else it has ended and removed the file
        raise AssertionError("there is always another attempt")

    def _is_current(self, fd: int) -> bool:
        try:
            named, opened = os.stat(self._path), os.fstat(fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


OPEN_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def _flock(fd: int, directory: Path) -> LockHolder | None:
    """Lock a file; returns the holder if another process has the lock, or, without file locks, if it is alive.

    A lock beside the record of a process that has ended is held by one that only looks (`holder_of`), or has not
    written its own record yet.
    """
    holder = LockHolder()
    try:
        for _ in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                holder = _read_holder(fd)
                if holder.pid and (holder.host != socket.gethostname() or is_alive(holder)):
                    break
        return holder
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        if is_alive(holder := _read_holder(fd)):
            return holder
        log.warning("%s has no file locks: a run on another machine is not detected", directory)
        return None


def _read_holder(fd: int) -> LockHolder:
    """The holder's record, which it writes right after locking."""
    for _ in range(10):
        time.sleep(LOCK_POLL_S)
        try:
            return parse_as(LockHolder, os.pread(fd, OWNER_LIMIT_BYTES * 16, 0))
        except ExternalInputError:
            continue
    return LockHolder()


class ClaimedDirectory(CheckpointDirectory):
    """A directory of checkpoints that one trainer at a time publishes in.

    Args:
        run_id: of the run, for messages and in every checkpoint.
        claim: a claim taken by another process of the same run; None to take one with `claim_directory`.
    """

    def __init__(
        self, directory: str | Path, run_id: str = "", disk: FileSystem | None = None, claim: str | None = None
    ):
        super().__init__(directory, disk)
        self.run_id, self.claim = run_id, claim

    def claim_directory(self) -> str:
        """Become the owner of the directory and fence out the previous one. Called automatically at the first save.

        Returns:
            The claim, for other processes of the same run.
        """
        if self.claim is None:
            with write_errors(f"preparing {self.directory}"):
                self._prepare()
                with self.locked():
                    epoch = self._owner().get("epoch")
                    claim = f"{(epoch if isinstance(epoch, int) else 0) + 1}-{secrets.token_hex(8)}"
                    self._record(claim)
            self.claim = claim  # only now: a claim that could not be recorded is repeated
        return self.claim

    def borrow_claim(self) -> None:
        """Use the claim of the directory's current owner, if any: for maintenance that must not fence out a running
        trainer."""
        claim = self._owner().get("claim")
        if isinstance(claim, str):
            self.claim = claim

    def check_claim(self) -> None:
        """Check that the claim is still valid. The lock must be held.

        Raises:
            CheckpointFenced: another trainer has claimed the directory since.
        """
        assert self.claim is not None, "a claim is checked after it was taken"
        owner = self._owner()
        if owner.get("claim") == self.claim:
            return
        if "claim" not in owner:
            self._record(self.claim)  # the record was deleted; a later owner would have left its own
            return
        raise CheckpointFenced(
            f"{self.directory} was taken over by run {owner.get('run_id')} (process {owner.get('pid')} on "
            f"{owner.get('host')}, {owner.get('since')}); this run no longer publishes there. "
            "Stop one of the two, or give this one its own checkpoint.save_dir"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process that publishes or prunes here; `format.json` is locked, which is never replaced.

        Raises:
            CheckpointWriteFailed: another process held the lock for too long.
        """
        with write_errors("locking the directory of checkpoints"):
            handle = self._lock()
        try:
            yield
        finally:
            if handle is not None:
                with contextlib.suppress(OSError):  # the lock is gone all the same
                    self.disk.close(handle)

    def newest_and_next_sequence(self) -> tuple[Checkpoint | None, int]:
        """The last published checkpoint and the number of the next one, above all that the store behind has."""
        newest, following = super().newest_and_next_sequence()
        cold = read_upload_target(self.disk, self.directory)
        return newest, max(following, 1 + (cold.sequence_floor if cold else 0))

    # -- with the lock held -------------------------------------------------------------------------------------------

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

    # -- inside -------------------------------------------------------------------------------------------------------

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
        data = json.dumps(form, indent=2).encode() + b"\n"
        write_file(self.disk, temporary, [data])
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process was first, and cleaned up
            self._create_once(temporary, self.directory / FORMAT, data)
        self.disk.sync_directory(self.directory)

    def _create_once(self, temporary: Path, target: Path, data: bytes) -> None:
        """Give a finished file its name unless another process created one; it is never replaced, since processes lock
        its inode."""
        try:
            self.disk.link(temporary, target)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            write_file(self.disk, target, [data])  # nobody reads it
        self.disk.unlink(temporary)

    def _lock(self) -> FileHandle | None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            while (handle := self.disk.lock(self.directory / FORMAT)) is None:
                if time.monotonic() > deadline:
                    raise CheckpointWriteFailed(
                        f"{self.directory / FORMAT} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s; "
                        "is a trainer that saves there suspended?"
                    )
                time.sleep(LOCK_POLL_S)
        except OSError as error:
            if error.errno not in NO_LOCK:
                raise
            log.warning("%s has no file locks: two trainers may detect each other too late", self.directory)
            return None
        return handle

    def _owner(self) -> dict[str, Any]:
        try:
            return parse_mapping(self.disk.read(self.directory / OWNER, OWNER_LIMIT_BYTES))
        except (FileNotFoundError, ExternalInputError):
            return {}

    def _record(self, claim: str) -> None:
        holder = LockHolder.here(self.run_id)
        owner = {"claim": claim, "epoch": int(claim.split("-")[0]), "run_id": holder.run_id}
        owner |= {"host": holder.host, "pid": holder.pid, "since": holder.since}
        write_by_rename(self.disk, self.directory / OWNER, json.dumps(owner, indent=2).encode() + b"\n")
        self.disk.sync_directory(self.directory)


def _process_start(pid: int) -> str:
    """Start time of a process of this machine, in clock ticks; empty if unknown, or if it has ended."""
    fields = process_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def is_alive(holder: LockHolder) -> bool:
    """Whether the holder is another running process of this machine."""
    if not holder.pid or holder.host != socket.gethostname() or holder.pid == os.getpid():
        return False
    try:
        os.kill(holder.pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM and _process_start(holder.pid) in ("", holder.started)
    return _process_start(holder.pid) == holder.started
