"""Who owns a directory or a place in a store: one living run, whose end frees it; each interleaving is forced."""

import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from storage.s3_server import BUCKET

from verl.checkpoint import ownership
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core import filesystem
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.ownership import Owner, RunLock, StoreLease, living_holder, newest_lease
from verl.checkpoint.read.discovery import FORMAT, RUN_LOCK
from verl.errors import StorageUnreachable
from verl.storage.config import LocalStorage, S3Storage, Storage


@contextmanager
def forked(begin: Callable[[], Any]) -> Iterator[int]:
    """Another process, which has called `begin` and then waits; it ends without any further word."""
    told, tell = os.pipe()
    if not (pid := os.fork()):
        RunLock._of_this_process.clear()
        os.write(tell, json.dumps(begin() is None).encode())
        signal.pause()
        os._exit(0)
    os.close(tell)
    try:
        assert os.read(told, 9) == b"true"
        yield pid
    finally:
        os.close(told)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- the record -------------------------------------------------------------------------------------------------------


def test_a_process_that_has_ended_and_was_not_reaped_owns_nothing():
    with forked(lambda: None) as pid:
        record = replace(Owner.here("first"), pid=pid, started=ownership.process_start(pid))
        assert record.is_alive
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not record.is_alive


def test_a_process_id_that_is_another_users_by_now_is_not_the_owner(monkeypatch):
    def forbidden(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(ownership.os, "kill", forbidden)
    parent = replace(Owner.here("first"), pid=os.getppid())
    assert not replace(parent, started="1").is_alive
    assert replace(parent, started=ownership.process_start(os.getppid())).is_alive


def test_a_run_in_a_container_of_another_name_is_not_taken_for_dead():
    parent = replace(Owner.here("first"), host="another-name", pid=os.getppid())
    assert replace(parent, started=ownership.process_start(os.getppid())).is_alive
    assert not replace(parent, machine="another machine").is_alive


# -- a directory ------------------------------------------------------------------------------------------------------


def test_a_directory_is_one_living_runs_and_of_the_next_one_when_that_is_killed(tmp_path):
    with forked(lambda: RunLock(tmp_path, Owner.here("living")).acquire()) as pid:
        holder = RunLock(tmp_path, Owner.here("second")).acquire()
        assert holder == RunLock.holder_of(tmp_path)
        assert (holder.run_id, holder.pid) == ("living", pid)
    lock = RunLock(tmp_path, Owner.here("second"))
    assert lock.acquire() is None
    assert RunLock.held_here(tmp_path) is lock
    assert RunLock.holder_of(tmp_path) is None
    lock.release()
    assert not (tmp_path / RUN_LOCK).exists()


def test_a_later_run_of_one_process_takes_over_from_an_earlier_one(tmp_path):
    early, late = (RunLock(tmp_path / "checkpoints", Owner.here(name)) for name in ("early", "late"))
    assert early.acquire() is late.acquire() is None
    early.release()
    assert RunLock.held_here(tmp_path / "checkpoints") is late
    late.release()
    assert not (tmp_path / "checkpoints").exists(), "what was made for the lock goes with it"


def test_the_end_of_a_run_does_not_give_the_directory_back_to_one_that_it_fenced_out(tmp_path):
    early = CheckpointStore(tmp_path, "early")
    early.claim_directory()
    late = RunLock(tmp_path, Owner.here("late"))
    assert late.acquire() is None
    claim = CheckpointStore(tmp_path, "late").claim_directory()
    late.release()
    assert ownership.read_owner(tmp_path).claim == claim
    assert RunLock.holder_of(tmp_path) is None
    with early.locked(), pytest.raises(ownership.CheckpointFenced, match="taken over by run late"):
        early.check_claim()
    assert int(CheckpointStore(tmp_path).claim_directory().partition("-")[0]) == 3


def test_a_run_whose_lock_file_was_removed_does_not_remove_that_of_the_next_one(tmp_path):
    first = RunLock(tmp_path, Owner.here("first"))
    assert first.acquire() is None
    (tmp_path / RUN_LOCK).unlink()
    with forked(lambda: RunLock(tmp_path, Owner.here("living")).acquire()):
        first.release()
        assert RunLock(tmp_path, Owner.here("third")).acquire().run_id == "living", "two hold the directory"


@pytest.mark.parametrize("is_same", [True, False])
def test_a_run_whose_directory_was_removed_locks_the_one_that_is_made_again(is_same, tmp_path):
    directory = tmp_path / "checkpoints"
    first = RunLock(directory, Owner.here("first"))
    assert first.acquire() is None
    claim = CheckpointStore(directory, "first").claim_directory()
    shutil.rmtree(directory)
    again = first if is_same else RunLock(directory, Owner.here("later"))
    assert again.acquire() is None
    assert (RunLock.held_here(directory), ownership.read_owner(directory).claim) == (again, claim)
    with forked(lambda: None if RunLock.holder_of(directory) else "another process may take it"):
        pass
    again.release()
    first.release()
    assert not directory.exists()


@pytest.mark.parametrize("call", ["acquire", "holder_of"])
def test_one_who_only_looks_at_a_dead_runs_lock_is_not_taken_for_its_holder(call, tmp_path, monkeypatch):
    (tmp_path / RUN_LOCK).write_text(json.dumps(asdict(Owner.here("dead"))))
    looking = os.open(tmp_path / RUN_LOCK, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    monkeypatch.setattr(ownership.time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    lock = RunLock(tmp_path, Owner.here("second"))
    assert (lock.acquire() if call == "acquire" else RunLock.holder_of(tmp_path)) is None
    lock.release()
    os.close(looking)


def test_a_directory_that_an_ending_run_removes_is_made_again_by_the_next(tmp_path, monkeypatch):
    directory, opened, removed = tmp_path / "checkpoints", os.open, []

    def open_after_the_removal(path, *args, **options):
        if not removed and Path(path) == directory / RUN_LOCK:
            removed.append(directory.rmdir())  # as `release` of the run that made it
        return opened(path, *args, **options)

    monkeypatch.setattr(ownership.os, "open", open_after_the_removal)
    lock = RunLock(directory, Owner.here("second"))
    assert lock.acquire() is None
    assert removed
    assert (directory / RUN_LOCK).exists()
    lock.release()


def test_without_file_locks_a_living_run_of_this_machine_is_found_and_a_later_claim_fences(tmp_path, monkeypatch):
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(ownership.fcntl, "flock", no_locks)
    with forked(lambda: RunLock(tmp_path, Owner.here("living")).acquire()):
        assert RunLock(tmp_path, Owner.here("second")).acquire().run_id == "living"
    lock = RunLock(tmp_path, Owner.here("second"))
    assert lock.acquire() is None
    of_another_machine = replace(Owner.here("third"), pid=1, machine="another", host="another")
    (tmp_path / RUN_LOCK).write_text(json.dumps(asdict(of_another_machine)))
    lock.release()
    assert ownership.read_owner(tmp_path) == of_another_machine, "the end of one run frees the directory of another"


def test_the_lock_of_a_file_that_was_replaced_is_nobodys(tmp_path, monkeypatch):
    path, locked, disk = tmp_path / FORMAT, fcntl.flock, FileSystem()
    path.write_text("old")

    def lock_after_the_replacement(fd: int, operation: int) -> None:
        if path.read_text() == "old":
            (tmp_path / "new").write_text("new")
            os.replace(tmp_path / "new", path)
        locked(fd, operation)

    monkeypatch.setattr(filesystem.fcntl, "flock", lock_after_the_replacement)
    assert disk.lock(path) is None
    handle = disk.lock(path)
    assert disk.lock(path) is None
    disk.close(handle)


# -- a place in a store -----------------------------------------------------------------------------------------------


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return LocalStorage(path=str(tmp_path / "bucket"))


def living_run(storage: Storage) -> AbstractContextManager[int]:
    """Another process, by its id, whose run holds the place."""

    def begin() -> Owner | None:
        ownership.RENEW_EVERY_S = 0.05
        held = StoreLease(storage, Owner.here("first"))
        holder = held.acquire()
        held.keep()
        return holder

    return forked(begin)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process looks from a machine that sees no process of the other."""
    monkeypatch.setattr(ownership, "machine_id", lambda: "another machine")
    monkeypatch.setattr(ownership, "LOOK_EVERY_S", 0.05)


def test_a_place_that_a_living_run_of_another_machine_holds_is_not_taken_and_one_that_it_gave_up_is(
    storage, monkeypatch
):
    with living_run(storage) as pid:
        elsewhere(monkeypatch)
        mine = StoreLease(storage, Owner.here("second"))
        holder = mine.acquire(wait_s=60)
        assert (holder.run_id, holder.pid) == ("first", pid)
        assert not mine.owner.epoch
        assert living_holder(storage, 60) is not None
    StoreLease(storage, holder).release()
    assert mine.acquire(wait_s=60) is None, "a place that was given up is free at once"


def test_a_dead_runs_place_is_taken_at_once_on_its_machine_and_after_a_while_elsewhere(storage, monkeypatch):
    with living_run(storage):
        assert StoreLease(storage, Owner.here("near")).acquire(wait_s=60) is not None
    with storage.connect() as store, monkeypatch.context() as patched:
        epoch = newest_lease(store).epoch
        elsewhere(patched)
        assert living_holder(storage, 0.2) is None
        far = StoreLease(storage, Owner.here("far"))
        assert far.acquire(wait_s=0.3) is None
    assert far.owner.epoch == epoch + 1
    near = StoreLease(storage, Owner.here("near"))
    assert near.acquire(wait_s=0.3) is None
    near.release()
    with storage.connect() as store:
        assert not far.renew(store), "who lost it does not write it again"
        assert newest_lease(store).is_released


@pytest.mark.parametrize("listed", [0, 1, 2])
def test_a_listing_older_than_the_newest_lease_gives_nobody_a_place_that_is_held(storage, monkeypatch, listed):
    for name in ("first", "next"):
        lease = StoreLease(storage, Owner.here(name))
        assert lease.acquire() is None
        lease.release()
    holder = StoreLease(storage, Owner.here("holder"))
    assert holder.acquire() is None
    late = iter([Owner(epoch=listed, is_released=True)])
    monkeypatch.setattr(ownership, "newest_lease", lambda store: next(late, None) or newest_lease(store))
    monkeypatch.setattr(Owner, "is_alive", property(lambda owner: not owner.is_released))
    refused = StoreLease(storage, Owner.here("late")).acquire()
    assert refused is not None, "two hold the place"
    assert (refused.run_id, refused.epoch) == ("holder", 3)


def test_what_somebody_else_wrote_there_is_nobodys_lease_and_a_store_that_is_gone_is_told(storage, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with storage.connect() as store:
        store.put("leases/000000000003.json", b'{"pid": "seven"}')
        store.put("leases/notes.txt", b"by hand")
    mine = StoreLease(storage, Owner.here("second"))
    assert mine.acquire(wait_s=60) is None
    assert (mine.owner.epoch, mine.owner.run_id) == (4, "second")
    gone = S3Storage(bucket=BUCKET, endpoint_url="http://127.0.0.1:9", retries=0)
    with pytest.raises(StorageUnreachable):
        StoreLease(gone, Owner.here("second")).acquire()
