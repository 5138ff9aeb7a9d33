"""Fencing: one trainer at a time writes a directory; a later claim fences the earlier writer out.

`owner.json` names the newest claim. A trainer checks, under a lock and immediately before it commits, that the claim is
still its own.

`run.lock` shows whether the run that saves here is alive: it is locked during the lifetime of the run's process, and
identifies the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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

from verl.checkpoint.core.filesystem import NO_LOCK, FileHandle, FileSystem, write_by_rename, write_errors
from verl.checkpoint.read.discovery import FORMAT, OWNER, RUN_LOCK, refuse_inside
from verl.errors import CheckpointFenced, CheckpointWriteFailed
from verl.utils.external_input import ExternalInputError, parse_as, parse_mapping

log = logging.getLogger(__name__)
OWNER_LIMIT_BYTES = 65_536
LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.02


class WriterLease:
    """A trainer's claim on a directory of checkpoints.

    Args:
        root: the directory; processes lock its `format.json`, which is never replaced.
        run_id: of the run, for messages.
        claim: a claim taken by another process of the same run; None to take one with `take`.
    """

    def __init__(self, disk: FileSystem, root: Path, run_id: str, claim: str | None = None):
        self.claim = claim
        self._disk, self._root, self._run_id = disk, root, run_id

    def take(self) -> str:
        """Claim the directory for this trainer. The lock must be held."""
        epoch = self._recorded().get("epoch")
        claim = f"{(epoch if isinstance(epoch, int) else 0) + 1}-{secrets.token_hex(8)}"
        self._record(claim)
        self.claim = claim  # only now: a claim that could not be recorded is repeated
        return claim

    def borrow(self) -> None:
        """Use the claim of the directory's current owner, if any: for maintenance that must not fence out a running
        trainer."""
        claim = self._recorded().get("claim")
        if isinstance(claim, str):
            self.claim = claim

    def check(self) -> None:
        """Check that the claim is still valid. The lock must be held.

        Raises:
            CheckpointFenced: another trainer has claimed the directory since.
        """
        assert self.claim is not None, "a claim is checked after it was taken"
        recorded = self._recorded()
        if recorded.get("claim") == self.claim:
            return
        if "claim" not in recorded:
            self._record(self.claim)  # the record was deleted; a later owner would have left its own
            return
        raise CheckpointFenced(
            f"{self._root} was taken over by run {recorded.get('run_id')} (process {recorded.get('pid')} on "
            f"{recorded.get('host')}, {recorded.get('since')}); this run no longer publishes there. "
            "Stop one of the two, or give this one its own checkpoint.save_dir"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process that publishes or prunes here.

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
                    self._disk.close(handle)

    def _lock(self) -> FileHandle | None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            while (handle := self._disk.lock(self._root / FORMAT)) is None:
                if time.monotonic() > deadline:
                    raise CheckpointWriteFailed(
                        f"{self._root / FORMAT} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s; "
                        "is a trainer that saves there suspended?"
                    )
                time.sleep(LOCK_POLL_S)
        except OSError as error:
            if error.errno not in NO_LOCK:
                raise
            log.warning("%s has no file locks: two trainers may detect each other too late", self._root)
            return None
        return handle

    def _recorded(self) -> dict[str, Any]:
        try:
            return parse_mapping(self._disk.read(self._root / OWNER, OWNER_LIMIT_BYTES))
        except (FileNotFoundError, ExternalInputError):
            return {}

    def _record(self, claim: str) -> None:
        owner = {
            "claim": claim,
            "epoch": int(claim.split("-")[0]),
            "run_id": self._run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_by_rename(self._disk, self._root / OWNER, json.dumps(owner, indent=2).encode() + b"\n")
        self._disk.sync_directory(self._root)


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
    """

    _of_this_process: ClassVar[dict[str, RunLock]] = {}

    def __init__(self, directory: Path, run_id: str, identity: Mapping[str, Any], setting: str = "checkpoint.save_dir"):
        self._path = directory / RUN_LOCK
        self._setting = setting
        self._made: list[Path] = []
        self._fd: int | None = None
        self._is_held = False  # whether it should be held; the file may be missing
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pid, host = os.getpid(), socket.gethostname()
        self._own = LockHolder(
            run_id=run_id, host=host, pid=pid, since=since, started=_process_start(pid), identity=dict(identity)
        )

    @property
    def holder(self) -> LockHolder:
        """This run, as written to the lock file."""
        return self._own

    def acquire(self) -> LockHolder | None:
        """Take the lock. Returns the holder if that is another process, and None on success.

        Raises:
            CheckpointWriteFailed: the directory cannot be created or written.
        """
        refuse_inside(self._path.parent, self._setting)
        with write_errors(f"claiming {self._path.parent}"):
            for path in (self._path.parent, *self._path.parent.parents):
                if path.exists():
                    break
                self._made.append(path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            key = os.path.realpath(self._path)
            before = self._of_this_process.get(key)
            if before is not None and before._own.pid == self._own.pid:  # of a fork, it is the parent's
                self._fd, before._fd, before._is_held = before._fd, None, False
                self._made = before._made
            elif (holder := self._lock()) is not None:
                return holder
            self._of_this_process[key] = self
            assert self._fd is not None
            data = json.dumps(asdict(self._own)).encode() + b"\n"
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
            self._path.unlink()
        os.close(self._fd)
        self._fd = None
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    @classmethod
    def is_held_here(cls, directory: Path) -> bool:
        """Whether a run of this process holds the lock."""
        lock = cls._of_this_process.get(os.path.realpath(directory / RUN_LOCK))
        return lock is not None and lock._own.pid == os.getpid()

    @classmethod
    def look(cls, directory: Path) -> LockHolder | None:
        """The other process that holds the lock, if any; does not take the lock."""
        path = directory / RUN_LOCK
        if os.path.realpath(path) in cls._of_this_process:
            return None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return cls._read_holder(fd)
        except OSError:
            holder = cls._read_holder(fd)
            return holder if is_alive(holder) else None
        finally:
            os.close(fd)
        return None

    def _lock(self) -> LockHolder | None:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._read_holder(fd)
                os.close(fd)
                return holder
            except OSError as error:
                if error.errno not in NO_LOCK:
                    os.close(fd)
                    raise
                holder = self._read_holder(fd)
                if is_alive(holder):
                    os.close(fd)
                    return holder
                log.warning("%s has no file locks: a run on another machine is not detected", self._path.parent)
            if self._is_current(fd):
                self._fd = fd
                return None
            os.close(fd)  # its holder has ended and removed the file

    def _is_current(self, fd: int) -> bool:
        try:
            named, opened = os.stat(self._path), os.fstat(fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    @staticmethod
    def _read_holder(fd: int) -> LockHolder:
        """The holder's record, which it writes right after locking."""
        for _ in range(10):
            time.sleep(LOCK_POLL_S)
            try:
                return parse_as(LockHolder, os.pread(fd, OWNER_LIMIT_BYTES * 16, 0))
            except ExternalInputError:
                continue
        return LockHolder()


def _process_start(pid: int) -> str:
    """Start time of a process of this machine, in clock ticks; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def is_alive(holder: LockHolder) -> bool:
    """Whether the holder is another running process of this machine."""
    if not holder.pid or holder.host != socket.gethostname() or holder.pid == os.getpid():
        return False
    try:
        os.kill(holder.pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return _process_start(holder.pid) == holder.started
