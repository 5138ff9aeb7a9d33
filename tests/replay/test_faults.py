"""A full disk, and a process killed at any call of the file system: what was saved is there, and nothing is wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from replay.rows_here import scored_rows
from replay.test_buffer import SMALL, texts

from verl.checkpoint.disk import Disk
from verl.replay.buffer import TieredBuffer
from verl.replay.sampling import Wanted
from verl.replay.state import attach, state_of

ALL = Wanted(num_rows=1000, step=9, version=9)


class FullDisk(Disk):
    """No space for any new byte while `is_full`."""

    is_full = True

    def perform(self, operation, call, *args):
        if self.is_full and operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().perform(operation, call, *args)


def test_a_full_disk_loses_nothing_while_memory_has_room(tmp_path, caplog):
    disk = FullDisk()
    buffer = TieredBuffer(SMALL, tmp_path / "here", seed=7, disk=disk)
    for step in range(1, 5):
        buffer.append(scored_rows(24, seed=step, version=step), step)
    state = state_of(buffer)
    assert "cannot be written and stay in memory" in caplog.text
    assert not state.shared
    found = buffer.sample(ALL)
    assert found is not None
    assert len(found) == 96
    saved = tmp_path / "saved"
    saved.mkdir()
    for name, data in state.files.items():  # the checkpoint may lie on another disk
        (saved / name).write_bytes(data)
    other = TieredBuffer(SMALL, tmp_path / "next", seed=7)
    attach(other, saved, verify=True)
    assert texts(other.sample(ALL)) == texts(found)
    disk.is_full = False
    assert len(state_of(buffer).shared) == 1
    assert buffer.stats()["replay/lost_rows"] == 0
    buffer.close()
    other.close()


def test_a_full_disk_and_full_memory_cost_the_oldest_rows_and_are_counted(tmp_path):
    buffer = TieredBuffer(SMALL, tmp_path / "here", seed=7, disk=FullDisk())
    longest = 2000
    for step in range(1, 12):
        buffer.append(scored_rows(24, seed=step, version=step, longest=longest), step)
    lost = buffer.stats()["replay/lost_rows"]
    assert lost > 0
    assert buffer.tail.num_bytes < 4 * 2**20
    found = buffer.sample(ALL)
    assert found is not None
    assert len(found) == 11 * 24 - lost
    buffer.close()


DIES = """
import os, sys
from pathlib import Path
from replay.rows_here import scored_rows
from replay.test_buffer import SMALL
from verl.checkpoint.disk import Disk
from verl.replay.buffer import TieredBuffer
from verl.replay.state import state_of

class Deadly(Disk):
    left = int(sys.argv[2])
    def perform(self, operation, call, *args):
        if self.left == 0:
            os._exit(9)
        type(self).left -= 1
        return super().perform(operation, call, *args)

buffer = TieredBuffer(SMALL, Path(sys.argv[1]), seed=7, disk=Deadly())
buffer.append(scored_rows(24, seed=1, version=1), 1)
state_of(buffer)
os._exit(0)
"""


@pytest.mark.parametrize("calls", [pytest.param(0, marks=pytest.mark.exhaustive), 4, *(
    pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 3, 5, 6, 7)
)])  # fmt: skip
def test_a_process_killed_while_it_seals_leaves_a_whole_shard_or_none(calls, tmp_path):
    here = tmp_path / "here"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path("tests").absolute()), *sys.path])}
    done = subprocess.run([sys.executable, "-c", DIES, here, str(calls)], env=env, timeout=120)
    assert done.returncode in (0, 9)
    shards = list(here.glob("rows_*.arrow"))
    assert len(shards) <= 1
    reference = TieredBuffer(SMALL, tmp_path / "reference", seed=7)
    reference.append(scored_rows(24, seed=1, version=1), 1)
    whole = state_of(reference)
    for shard in shards:
        assert shard.read_bytes() == whole.shared[shard.name].path.read_bytes()
    reference.close()
