"""A full disk, and a process killed at any call of the file system: what was saved is there, and nothing is wrong."""

import dataclasses
import errno
import os
from functools import partial
from pathlib import Path

import pytest
from faults.disks import KillingDisk, is_killed
from replay.rows_here import scored_rows
from replay.test_buffer import SMALL, saved, shared, texts

from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import hash_buffers
from verl.errors import ReplayError
from verl.replay.buffer import TieredBuffer
from verl.replay.config import ReplayRequest
from verl.replay.remote_tier import RemoteTier
from verl.replay.shard import ShardFile
from verl.storage.config import LocalStorage

ALL = ReplayRequest(num_rows=1000, step=9, version=9)


class FullDisk(FileSystem):
    """No space for any new byte while `is_full`."""

    is_full = True

    def perform(self, operation, call, *args):
        if self.is_full and operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().perform(operation, call, *args)


def test_a_full_disk_ends_the_run_and_costs_no_row_of_a_checkpoint(tmp_path):
    disk = FullDisk()
    disk.is_full = False
    buffer = TieredBuffer(SMALL, tmp_path / "here", seed=7, disk=disk)
    buffer.append(scored_rows(24, seed=1, version=1), 1)
    directory, found = saved(buffer, tmp_path / "saved"), texts(buffer.sample(ALL))
    disk.is_full = True
    with pytest.raises(ReplayError, match="directory"):  # noqa: PT012 - in the background
        for step in range(2, 12):
            buffer.append(scored_rows(24, seed=step, version=step, longest=2000), step)
    buffer.close()
    other = TieredBuffer(SMALL, tmp_path / "next", seed=7)
    other.load_state_dict(directory)
    assert texts(other.sample(ALL)) == found
    other.close()


def sealed(directory: Path, disk: FileSystem | None = None) -> dict[str, Path]:
    """The shard of 24 rows."""
    buffer = TieredBuffer(SMALL, directory, seed=7, disk=disk)
    buffer.append(scored_rows(24, seed=1, version=1), 1)
    files = shared(buffer)
    buffer.close()
    return files


@pytest.mark.slow
def test_a_process_killed_while_it_seals_leaves_a_whole_shard_or_none(tmp_path):
    (whole,) = sealed(tmp_path / "whole").values()
    calls = 0
    while is_killed(partial(sealed, tmp_path / str(calls), KillingDisk(calls, "before"))):
        left = [*(tmp_path / str(calls)).glob("rows_*.arrow")]
        assert [path.read_bytes() for path in left] in ([], [whole.read_bytes()])
        assert [*sealed(tmp_path / str(calls))] == [whole.name], "the next one makes it anew"
        calls += 1
    assert calls > 5


@pytest.mark.slow
def test_a_process_killed_while_it_fetches_leaves_nothing_that_is_taken_for_a_shard(tmp_path):
    (whole,) = sealed(tmp_path / "whole").values()
    data = whole.read_bytes()
    shard = ShardFile(first_row=0, num_rows=24, size=len(data), leaves=hash_buffers([data]))
    storage, here = LocalStorage(path=str(tmp_path / "store")), tmp_path / "here"

    def fetch(disk: FileSystem) -> None:
        cold = RemoteTier(storage.connect(), here, timeout_s=30.0, retry_s=1.0)
        cold.disk = disk
        assert cold.download(shard).read_bytes() == whole.read_bytes()

    with storage.connect() as store:
        store.put_file(f"replay/{shard.name}", whole)
    calls = 0
    while is_killed(partial(fetch, KillingDisk(calls, "before"))):
        calls += 1
    assert calls > 3
    assert [path.name for path in here.iterdir()] == [shard.name]
    RemoteTier(storage.connect(), here, timeout_s=30.0, retry_s=1.0).close()
    assert not [*here.iterdir()], "what another process fetched is fetched anew"


def test_runs_of_one_name_that_keep_their_rows_elsewhere_do_not_meet(tmp_path):
    settings = dataclasses.replace(SMALL, directory=str(tmp_path / "scratch"))
    runs = [tmp_path / sweep / "0" for sweep in ("monday", "tuesday")]
    (mine,) = sealed(settings.directory_of(runs[0])).values()
    TieredBuffer(settings, settings.directory_of(runs[1])).close()
    assert mine.is_file()
    assert mine.parent.parent == tmp_path / "scratch"
    assert (runs[0] / "replay" / mine.name).samefile(mine), "the run's directory leads there"
    TieredBuffer(settings, settings.directory_of(runs[0])).close()  # the same run once more
    assert not mine.exists()
