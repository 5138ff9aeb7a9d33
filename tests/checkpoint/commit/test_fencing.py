"""Locks of runs and directories where another process changes what was just looked at; each interleaving is forced."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from verl.checkpoint.commit import fencing
from verl.checkpoint.commit.fencing import ClaimedDirectory, LockHolder, RunLock, is_alive
from verl.checkpoint.core import filesystem
from verl.checkpoint.core.filesystem import FileHandle, FileSystem, write_by_rename
from verl.checkpoint.read.discovery import FORMAT, RUN_LOCK

HOLDER = """
import sys
from pathlib import Path
from verl.checkpoint.commit.fencing import RunLock
print(RunLock(Path(sys.argv[1]), "living", {}).acquire(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that waits for the end of its input."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True, stderr=-3)
    yield process
    process.kill()
    process.communicate()


def ended_but_not_reaped(process: subprocess.Popen[str]) -> LockHolder:
    """The record of a run whose process has ended, and whose parent has not asked for its status."""
    record = LockHolder(run_id="first", host=LockHolder.here("").host, pid=process.pid, started=started(process.pid))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return record


def started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_process_that_has_ended_and_was_not_reaped_holds_nothing(child):
    living = LockHolder(run_id="first", host=LockHolder.here("").host, pid=child.pid, started=started(child.pid))
    assert is_alive(living)
    assert not is_alive(ended_but_not_reaped(child))


def test_a_process_id_that_is_another_users_by_now_is_not_the_holder(child, monkeypatch):
    record = ended_but_not_reaped(child)

    def forbidden(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(fencing.os, "kill", forbidden)
    assert not is_alive(LockHolder(host=record.host, pid=os.getppid(), started="1"))
    assert is_alive(LockHolder(host=record.host, pid=os.getppid(), started=started(os.getppid())))


def test_a_run_whose_lock_file_was_removed_does_not_remove_that_of_the_next_one(tmp_path):
    first = RunLock(tmp_path, "first", {})
    assert first.acquire() is None
    (tmp_path / RUN_LOCK).unlink()
    living = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    try:
        assert living.stdout is not None
        assert living.stdout.readline() == "None\n"
        first.release()
        holder = RunLock(tmp_path, "third", {}).acquire()
        assert holder is not None, "two hold the directory"
        assert holder.run_id == "living"
    finally:
        living.kill()
        living.communicate()


@pytest.mark.parametrize("call", ["acquire", "holder_of"])
def test_one_who_only_looks_at_a_dead_runs_lock_is_not_taken_for_its_holder(call, tmp_path, child, monkeypatch):
    record = json.dumps(asdict(ended_but_not_reaped(child)))
    (tmp_path / RUN_LOCK).write_text(record)
    looking = os.open(tmp_path / RUN_LOCK, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    read = fencing._read_holder

    def read_while_the_other_ends(fd: int) -> LockHolder:
        fcntl.flock(looking, fcntl.LOCK_UN)
        return read(fd)

    monkeypatch.setattr(fencing, "_read_holder", read_while_the_other_ends)
    try:
        lock = RunLock(tmp_path, "second", {})
        assert (lock.acquire() if call == "acquire" else RunLock.holder_of(tmp_path)) is None
        lock.release()
    finally:
        os.close(looking)


def test_a_directory_that_an_ending_run_removes_is_made_again_by_the_next(tmp_path, monkeypatch):
    directory, opened, removed = tmp_path / "checkpoints", os.open, []

    def open_after_the_removal(path, *args, **options):
        if not removed and Path(path) == directory / RUN_LOCK:
            removed.append(directory.rmdir())  # as `release` of the run that made it
        return opened(path, *args, **options)

    monkeypatch.setattr(fencing.os, "open", open_after_the_removal)
    lock = RunLock(directory, "second", {})
    assert lock.acquire() is None
    assert removed
    assert (directory / RUN_LOCK).exists()
    lock.release()


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
    assert handle is not None
    assert disk.lock(path) is None
    disk.close(handle)


class SecondWriter(FileSystem):
    """A disk on which another process writes the same file while this one does."""

    def __init__(self, path: Path) -> None:
        self._written = [path]

    def sync(self, handle: FileHandle) -> None:
        if self._written:
            write_by_rename(FileSystem(), self._written.pop(), b"by the other")
        super().sync(handle)


def test_two_that_write_one_small_file_at_once_do_not_take_each_others_part(tmp_path):
    path = tmp_path / "uploaded"
    write_by_rename(SecondWriter(path), path, b"by this one")
    assert path.read_bytes() == b"by this one"
    assert list(tmp_path.iterdir()) == [path]


class NoLinks(FileSystem):
    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links")


class LateLook(ClaimedDirectory):
    """Looked whether the directory is prepared before another process prepared it."""

    def exists(self, path: Path) -> bool:
        return path.name != FORMAT and super().exists(path)


def test_without_links_the_file_that_is_locked_is_not_replaced_by_one_who_prepares_too(tmp_path):
    ClaimedDirectory(tmp_path, "first", NoLinks()).claim_directory()
    inode = (tmp_path / FORMAT).stat().st_ino
    LateLook(tmp_path, "second", NoLinks()).claim_directory()
    assert (tmp_path / FORMAT).stat().st_ino == inode
