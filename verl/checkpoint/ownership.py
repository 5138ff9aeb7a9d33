"""Ownership: one run at a time saves in a directory, writes a run directory, or uploads to a place in a store.

run.lock                    in a directory: locked while the process of its run lives. Its record, `Owner`, stays: a run
                            that claims the directory raises its epoch, and from then on every commit of an earlier
                            owner is refused, on file systems without locks too
leases/000000000007.json    in a store: the same record under the number of its epoch, renewed while its run lives
COMMIT                      of a checkpoint: locked, shared, by whoever resumed from it, so that it is not pruned

The file of a lock is never replaced, because a lock belongs to an inode; the record is written into it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import NO_LOCK, FileHandle, FileSystem, write_errors
from verl.checkpoint.core.manifest import COMMIT, utc_now
from verl.checkpoint.read.discovery import FORMAT, RUN_LOCK, refuse_inside
from verl.errors import CheckpointFenced, CheckpointNotFound, ConfigError, ObjectDamaged, ObjectNotFound, StorageError
from verl.utils.external_input import ExternalInputError, parse_as
from verl.utils.orphan_cleanup import process_fields

if TYPE_CHECKING:
    from verl.storage.config import Storage
    from verl.storage.store import ObjectStore

log = logging.getLogger(__name__)
RECORD_LIMIT_BYTES = 2**20
LOCK_TIMEOUT_S, LOCK_POLL_S, LOCK_ATTEMPTS = 30.0, 0.02, 10
LOCK_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run that owns a directory or a place in a store; fields that are unknown are empty.

    Args:
        epoch: number of this ownership; the next one is higher.
        claim: names the ownership among those of all epochs; empty until the directory is claimed.
        started: start time of its process, in clock ticks since boot.
        machine: the boot and the process namespace that `pid` belongs to.
        identity: of its training, which other runs compare with theirs.
        renewed_at: when its lease was renewed, by the owner's clock.
        is_released: the run has ended.
    """

    epoch: int = 0
    claim: str = ""
    run_id: str = ""
    host: str = ""
    pid: int = 0
    since: str = ""
    started: str = ""
    machine: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    renewed_at: float = 0.0
    is_released: bool = False

    @classmethod
    def here(cls, run_id: str = "", identity: Mapping[str, Any] | None = None) -> Owner:
        """A run of this process."""
        pid, host = os.getpid(), socket.gethostname()
        process = {"host": host, "pid": pid, "started": process_start(pid), "machine": machine_id()}
        return cls(run_id=run_id, since=utc_now(), identity=dict(identity or {}), **process)

    def __str__(self) -> str:
        return f"run {self.run_id or '(unknown)'}: process {self.pid} on {self.host or '(unknown)'}, since {self.since}"

    @property
    def is_of_this_machine(self) -> bool:
        """Whether this process sees the owner's. Containers that do may have several host names."""
        return self.machine == machine_id() if self.machine else self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it is another running process of this machine."""
        if self.is_released or not self.pid or self.pid == os.getpid() or not self.is_of_this_machine:
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return error.errno == errno.EPERM and process_start(self.pid) in ("", self.started)
        return process_start(self.pid) == self.started


def process_start(pid: int) -> str:
    """Start time of a process of this machine, in clock ticks; empty if unknown, or if it has ended."""
    fields = process_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def machine_id() -> str:
    """An id that is equal for two processes that can see each other's process ids."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


# -- a directory -------------------------------------------------------------------------------------------------------


class RunLock:
    """Lock of a directory, held until its process ends, however it ends.

    Within one process a later run takes over the lock of an earlier one, which is fenced out at its next commit.

    Args:
        directory: of checkpoints, or of a run; created if missing.
        owner: this run.
        setting: configuration path of the directory, for messages.
    """

    _of_this_process: ClassVar[dict[str, RunLock]] = {}

    def __init__(self, directory: Path, owner: Owner, setting: str = "checkpoint.save_dir"):
        self._path, self._setting, self._key = directory / RUN_LOCK, setting, os.path.realpath(directory)
        self._made: list[Path] = []  # directories that did not exist
        self._fd: int | None = None
        self.owner = owner

    def acquire(self) -> Owner | None:
        """Take the lock. Returns the owner if that is another process, and None on success.

        Raises:
            CheckpointWriteFailed: the directory cannot be created or written.
        """
        directory, before = self._path.parent, self.held_here(self._path.parent)
        refuse_inside(directory, self._setting)
        with write_errors(f"locking {directory}"):
            missing = [*itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents))]
            fd = known = None
            if before is not None and before._fd is not None:
                known = _record_in(before._fd, attempts=1)
                fd = before._fd if _names(self._path, before._fd) else None
            if fd is None:  # also where the directory was removed, and the lock with it
                fd = self._lock()
                if isinstance(fd, Owner):
                    return fd
                if before is not None and before._fd is not None:
                    os.close(before._fd)
            if before is not None:
                before._fd, missing = None, max(missing, before._made, key=len)
            self._fd, self._made, self._of_this_process[self._key] = fd, missing, self
            known = known or _record_in(fd, attempts=1)
            _write_record(fd, replace(self.owner, epoch=known.epoch, claim=known.claim))
        return None

    @property
    def was_removed(self) -> bool:
        """Whether its file is gone from the directory, which was removed or moved, and may have been made again."""
        with contextlib.suppress(OSError):  # which the next save meets too
            return self._fd is not None and not _names(self._path, self._fd)
        return False

    def release(self) -> None:
        """Release the lock, and remove what was made for it; the record stays beside checkpoints. Idempotent."""
        if self._of_this_process.get(self._key) is self:
            del self._of_this_process[self._key]
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            known = _record_in(self._fd)
            is_own = (known.run_id, known.pid) == (self.owner.run_id, self.owner.pid)  # not without file locks
            if is_own and _names(self._path, self._fd):  # else it was removed, and the file there is another run's
                if (self._path.parent / FORMAT).exists():
                    _write_record(self._fd, replace(known, is_released=True))
                else:
                    self._path.unlink()
        os.close(self._fd)
        self._fd = None
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    @classmethod
    def held_here(cls, directory: Path) -> RunLock | None:
        """The lock of a run of this process on a directory."""
        lock = cls._of_this_process.get(os.path.realpath(directory))
        return lock if lock is not None and lock.owner.pid == os.getpid() else None  # in a fork it is the parent's

    @classmethod
    def holder_of(cls, directory: Path) -> Owner | None:
        """The other process that holds the lock of a directory, if any; does not take the lock."""
        if cls.held_here(directory) is None:
            with contextlib.suppress(OSError), _opened(directory / RUN_LOCK) as fd:
                return _flock(fd, directory)
        return None

    def _lock(self) -> int | Owner:
        """An open file of the lock, or the owner that holds it."""
        for _ in range(LOCK_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):  # a run that has ended removed the directory that it had made
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with _opened(self._path, os.O_CREAT) as fd:
                    if (holder := _flock(fd, self._path.parent)) is not None:
                        return holder
                    if _names(self._path, fd):  # else it has ended and removed the file
                        return os.dup(fd)  # of the same lock
        raise FileNotFoundError(errno.ENOENT, "it is removed as soon as it is made", str(self._path))


def lock_run_directory(run_dir: Path) -> RunLock | None:
    """Lock a run directory until the lock is released or this process ends; None if this process holds it already.

    Raises:
        ConfigError: another process writes there.
        CheckpointWriteFailed: the directory cannot be created or written.
    """
    if RunLock.held_here(run_dir) is not None:
        return None
    lock = RunLock(run_dir, Owner.here(), "hydra.run.dir")
    if (holder := lock.acquire()) is not None:
        raise ConfigError(
            f"hydra.run.dir is {run_dir}: process {holder.pid} on {holder.host or '(unknown)'} writes there since "
            f"{holder.since}, and the metrics, configuration and weights of two runs would mix. Wait for its end, stop "
            "it, or give this run a directory of its own (hydra.run.dir=DIR; in Python, run_dir)."
        )
    return lock


def claim_directory(directory: Path, run_id: str) -> str:
    """Become the owner of a directory of checkpoints and fence out the previous one. The lock of its commits must be
    held.

    Returns:
        The claim, for other processes of the same run.
    """
    lock = RunLock.held_here(directory)
    with _opened(directory / RUN_LOCK, os.O_CREAT) as fd:
        epoch = _record_in(fd, attempts=1).epoch + 1
        claim = f"{epoch}-{secrets.token_hex(8)}"
        _write_record(fd, replace(Owner.here(run_id) if lock is None else lock.owner, epoch=epoch, claim=claim))
        os.fsync(fd)
    return claim


def check_claim(directory: Path, claim: str) -> None:
    """Check that a claim is still valid. The lock of the directory's commits must be held.

    Raises:
        CheckpointFenced: another run has claimed the directory since.
    """
    owner = read_owner(directory)
    if owner.claim not in ("", claim):  # if the record was deleted, a later owner would have left its own
        raise CheckpointFenced(
            f"{directory} was taken over by {owner}; this run no longer publishes there. Stop one of the two, or give "
            "this one its own checkpoint.save_dir"
        )


def read_owner(directory: Path) -> Owner:
    """The record of the last owner of a directory; empty if there is none.

    Raises:
        OSError: the file system refuses.
    """
    try:
        with _opened(directory / RUN_LOCK) as fd:
            return _record_in(fd)
    except (FileNotFoundError, NotADirectoryError):
        return Owner()


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, LOCK_FLAGS | flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _flock(fd: int, directory: Path) -> Owner | None:
    """Lock a file; returns the owner if another process has the lock, or, without file locks, if it is alive.

    It is tried for a moment, since another process may only look (`holder_of`), or has not written its record yet.
    """
    try:
        for _ in range(LOCK_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            time.sleep(LOCK_POLL_S)
        return _record_in(fd)
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        if (owner := _record_in(fd)).is_alive:
            return owner
        log.warning("%s has no file locks: a run on another machine is not detected", directory)
        return None


def _record_in(fd: int, attempts: int = LOCK_ATTEMPTS) -> Owner:
    """The record in an open file, which may be written at this moment; empty if there is none."""
    for attempt in range(attempts):
        time.sleep(LOCK_POLL_S if attempt else 0.0)
        with contextlib.suppress(ExternalInputError):
            return parse_as(Owner, os.pread(fd, RECORD_LIMIT_BYTES, 0))
    return Owner()


def _write_record(fd: int, owner: Owner) -> None:
    data = json.dumps(asdict(owner)).encode() + b"\n"
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))


def _names(path: Path, fd: int) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


# -- a checkpoint ------------------------------------------------------------------------------------------------------


def wait_for_lock(disk: FileSystem, path: Path, shared: bool = False) -> FileHandle | None:
    """Lock a file of a directory of checkpoints; None on a file system without locks.

    Raises:
        TimeoutError: another process holds it.
        OSError: the file system refuses.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while (handle := disk.lock(path, shared=shared)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s: is a trainer that saves "
                    "there suspended?"
                )
            time.sleep(LOCK_POLL_S)
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        if not shared:
            log.warning("%s has no file locks: two runs may detect each other too late", path.parent)
        return None
    return handle


class CheckpointInUse:
    """Keeps retention from removing a checkpoint that a run was resumed from, until `release` or its process ends.

    Raises:
        CheckpointNotFound: it is gone, or is being removed.
    """

    def __init__(self, checkpoint: Checkpoint):
        disk, self.release = FileSystem(), lambda: None
        try:
            if (lock := wait_for_lock(disk, checkpoint.directory / COMMIT, shared=True)) is not None:
                self.release = weakref.finalize(self, disk.close, lock)
        except (FileNotFoundError, TimeoutError) as error:
            what = f"{checkpoint.directory} was removed, or is being removed, by the retention of its run"
            raise CheckpointNotFound(f"{what} ({error}). Start again.") from error


@contextlib.contextmanager
def unless_in_use(disk: FileSystem, checkpoint: Checkpoint) -> Iterator[bool]:
    """Whether no run holds a checkpoint in use, nor takes it meanwhile."""
    try:
        lock, is_free = disk.lock(checkpoint.directory / COMMIT), False
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        lock, is_free = None, True
    try:
        yield is_free or lock is not None
    finally:
        if lock is not None:
            disk.close(lock)


# -- a place in a store ------------------------------------------------------------------------------------------------

LEASES = "leases/"
LEASE_KEY = re.compile(rf"{LEASES}(\d{{12}})\.json")
RENEW_EVERY_S = 10.0
LEASE_S = 60.0  # not renewed for so long, its run is taken for dead
CERTAINLY_OVER_S = 1800.0  # by the clock, beyond what clocks of machines differ in
LOOK_EVERY_S = 0.5
END_TIMEOUT_S = 5.0


class StoreLease:
    """The lease of one run on a place in a store, which keeps two living runs from uploading to one prefix.

    It is taken by creating the object of the next epoch, which succeeds for only one process, renewed by writing the
    object again, and released by a final write. No lease is deleted: a number that was free again could be created by a
    process whose listing is older than its successor. A run that finds a lease waits to see whether it is renewed.

    Args:
        owner: this run.
    """

    def __init__(self, storage: Storage, owner: Owner):
        self.storage, self.owner = storage, owner
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait_s: float = LEASE_S) -> Owner | None:
        """Take the lease. Returns the owner if its run is alive, and None on success.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        with self.storage.connect() as store:
            while True:
                current = newest_lease(store)
                if _is_renewed(store, current, wait_s):
                    return current
                mine = replace(self.owner, epoch=current.epoch + 1)
                if store.create(_lease_key(mine.epoch), _renewed(mine)):
                    self.owner = mine
                    return None

    def keep(self) -> None:
        """Renew it periodically in a thread, until `release`."""
        if self.owner.epoch and self._thread is None:
            self._thread = threading.Thread(target=self._renew_all_the_time, name="store lease", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Release it; if the store does not answer, the lease expires. Idempotent."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=END_TIMEOUT_S)
        held, self.owner = self.owner, replace(self.owner, is_released=True)
        if held.epoch and not held.is_released:
            with contextlib.suppress(StorageError), replace(self.storage, retries=0).connect() as store:
                self.renew(store)

    def renew(self, store: ObjectStore) -> bool:
        """Renew the lease once; returns whether it still belongs to this run.

        Raises:
            StorageError: the store does not answer.
        """
        if newest_lease(store).epoch > self.owner.epoch:
            return False
        store.put(_lease_key(self.owner.epoch), _renewed(self.owner))
        return True

    def _renew_all_the_time(self) -> None:
        with replace(self.storage.hasty, retries=0).connect() as store:  # one request without an answer costs no lease
            while not self.owner.is_released:
                try:
                    if not self.renew(store):
                        return  # the next record of the log says so
                except StorageError as error:
                    log.info("the lease on %s could not be renewed: %s", self.storage.address, error)
                if self._over.wait(RENEW_EVERY_S):
                    return


def _renewed(owner: Owner) -> bytes:
    return json.dumps(asdict(replace(owner, renewed_at=time.time()))).encode()


def newest_lease(store: ObjectStore) -> Owner:
    """The current lease; an unreadable one counts as released, and none has epoch 0."""
    numbers = [int(match[1]) for stored in store.list(LEASES) if (match := LEASE_KEY.fullmatch(stored.key))]
    if not (number := max(numbers, default=0)):
        return Owner(is_released=True)
    try:
        return replace(parse_as(Owner, store.read(_lease_key(number), RECORD_LIMIT_BYTES)), epoch=number)
    except (ObjectNotFound, ObjectDamaged, ExternalInputError):
        return Owner(epoch=number, is_released=True)


def living_holder(storage: Storage, wait_s: float) -> Owner | None:
    """The run that holds the lease, if a renewal was seen within `wait_s`; does not take the lease."""
    with storage.connect() as store:
        current = newest_lease(store)
        return current if _is_renewed(store, current, wait_s) else None


def _is_renewed(store: ObjectStore, found: Owner, wait_s: float) -> bool:
    """Whether the owner of a lease is alive, that is, renews it.

    Clocks of different machines are compared only for a lease that was not renewed for many times its duration.
    """
    if found.is_released or (found.machine and found.is_of_this_machine):
        return found.is_alive
    if time.time() - found.renewed_at > CERTAINLY_OVER_S:
        return False
    if wait_s > RENEW_EVERY_S:
        log.warning("%s is held by %s: waiting up to %.0f s to see whether it is alive", store.address, found, wait_s)
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
        if (now := newest_lease(store)) != found:
            return not now.is_released
    return False


def _lease_key(number: int) -> str:
    return f"{LEASES}{number:012d}.json"
