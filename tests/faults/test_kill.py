"""The process is killed before, within and after every operation that changes the disk."""

from functools import partial

import pytest
from faults.disks import KillingDisk, RecordingDisk, is_killed
from faults.scenarios import Scenario, check, check_next_save, fast_directory, scenarios

from verl.checkpoint.commit.store import CheckpointStore

pytestmark = pytest.mark.slow


def count_operations(scenario: Scenario) -> int:
    with fast_directory() as base:
        scenario.prepare(base / "checkpoints")
        disk = RecordingDisk()
        scenario.act(CheckpointStore(base / "checkpoints", "second", disk))
        return disk.num_changing


def run(scenario: Scenario, stride: int) -> int:
    """Kill at every `stride`-th place; returns the number of cases."""
    places = [(at, moment) for at in range(count_operations(scenario)) for moment in ("before", "within", "after")]
    for number, (at, moment) in enumerate(places[::stride]):
        with fast_directory() as base:
            root = base / "checkpoints"
            scenario.prepare(root)
            store = CheckpointStore(root, "second", KillingDisk(at, moment))
            assert is_killed(partial(scenario.act, store)), f"operation {at} was not reached ({moment})"
            assert check(root, scenario, is_done=False) == [], f"killed {moment} operation {at}"
            if stride == 1 or number % 4 == 0:
                check_next_save(root)
    return len(places[::stride])


@pytest.mark.parametrize(("scenario", "whole"), scenarios("save from memory", "save with links", "retention"))
def test_a_kill_leaves_the_old_or_the_new_checkpoint(scenario, whole, record_property):
    record_property("fault_cases", run(scenario, stride=1 if whole else 41))
