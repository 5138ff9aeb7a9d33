"""The process is killed before, within and after every operation that changes the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults.disks import KILLED, KillingDisk, RecordingDisk
from faults.scenarios import SCENARIOS, Scenario, check, check_next_save, fast_directory

from verl.checkpoint.commit.store import CheckpointStore


def count_operations(scenario: Scenario) -> int:
    with fast_directory() as base:
        scenario.prepare(base / "checkpoints")
        disk = RecordingDisk()
        scenario.act(CheckpointStore(base / "checkpoints", "second", disk))
        return disk.num_changing


def killed(scenario: Scenario, root: Path, at: int, moment: str) -> bool:
    """Whether a child process was killed there, and not done before."""
    scenario.prepare(root)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            scenario.act(CheckpointStore(root, "second", KillingDisk(at, moment)))
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), "the child failed by itself"
    return code == KILLED


def run(scenario: Scenario, stride: int) -> int:
    """Kill at every `stride`-th place; returns the number of cases."""
    places = [(at, moment) for at in range(count_operations(scenario)) for moment in ("before", "within", "after")]
    for number, (at, moment) in enumerate(places[::stride]):
        with fast_directory() as base:
            root = base / "checkpoints"
            was_killed = killed(scenario, root, at, moment)
            assert was_killed, f"operation {at} was not reached ({moment})"
            assert check(root, scenario, is_done=False) == [], f"killed {moment} operation {at}"
            if stride == 1 or number % 4 == 0:
                check_next_save(root)
    return len(places[::stride])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_leaves_the_old_or_the_new_checkpoint(scenario, record_property):
    record_property("fault_cases", run(scenario, stride=41))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(scenario, record_property):
    record_property("fault_cases", run(scenario, stride=1))
