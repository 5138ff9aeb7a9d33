"""The power fails after any operation, and any part of what was not synced is lost."""

import random
import shutil
from collections.abc import Callable

import pytest
from faults.disks import Operation, RecordingDisk
from faults.power_cut import Trace, fingerprint, materialise, snapshot
from faults.scenarios import SCENARIOS, Scenario, check, check_next_save, fast_directory, scenarios

from verl.checkpoint.commit.store import CheckpointStore

pytestmark = pytest.mark.slow

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def traced(scenario: Scenario, skips: Callable[[Operation], bool] = lambda operation: False) -> Trace:
    """The effects of a scenario that ran to its end."""
    with fast_directory() as base:
        scenario.prepare(base / "checkpoints")
        before = snapshot(base)
        disk = RecordingDisk(skips)
        scenario.act(CheckpointStore(base / "checkpoints", "second", disk))
        return Trace.of(base, before, disk.operations)


def cut_everywhere(
    scenario: Scenario, trace: Trace, sample: int | None = None, is_first_enough: bool = False
) -> tuple[int, list[str]]:
    """Cut at every step, or look at a sample of the disks that may result.

    Returns:
        The number of cuts tried and what did not hold afterwards.
    """
    seen: dict[bytes, tuple[int, bool, dict]] = {}
    num_cuts = 0
    for at in range(len(trace.steps) + 1):
        for disk in trace.disks_after_cut(at):
            num_cuts += 1
            is_done = scenario.saves and at == len(trace.steps)
            seen.setdefault(fingerprint(disk) + bytes([is_done]), (at, is_done, disk))
    cases = list(seen.values())
    if sample is not None and len(cases) > sample:
        cases = random.Random(0).sample(cases[:-1], sample - 1) + cases[-1:]
    faults = []
    with fast_directory() as base:
        # Where one fault is enough, from the end: a missing sync does harm once the checkpoint is visible.
        for number, (at, is_done, disk) in enumerate(reversed(cases) if is_first_enough else cases):
            materialise(disk, base / "after")
            root = base / "after" / "checkpoints"
            found = check(root, scenario, is_done)
            faults += [f"cut after step {at}: {fault}" for fault in found]
            if found and is_first_enough:
                return num_cuts, faults
            if not found and number % 8 == 0:
                check_next_save(root)
            shutil.rmtree(base / "after")
    return num_cuts, faults


@pytest.mark.parametrize(("scenario", "whole"), scenarios("save from memory", "retention", "pull from a store"))
def test_a_power_cut_leaves_the_old_or_the_new_checkpoint(scenario, whole, record_property):
    num_cuts, faults = cut_everywhere(scenario, traced(scenario), sample=None if whole else 30)
    record_property("fault_cases", num_cuts if whole else 30)
    assert faults == []


def of_file(name: str) -> Callable[[Operation], bool]:
    return lambda operation: operation.name == "sync" and operation.path.name == name


def of_directory(matches: Callable[[str], bool]) -> Callable[[Operation], bool]:
    return lambda operation: operation.name == "sync_directory" and matches(operation.path.as_posix())


NEEDED = {
    "weights": ("save with links", of_file("model-00002-of-00002.safetensors")),
    "weights past the page cache": ("save from memory", of_file("model.safetensors")),
    "a changed file of an increment": ("save of an increment", of_file("model.safetensors")),
    "fetched weights": ("pull from a store", of_file("model-00002-of-00002.safetensors")),
    "slices": ("save with links", of_file("optim_state_rank_1.safetensors")),
    "trainer_state.json": ("same step again", of_file("trainer_state.json.tmp")),
    "manifest.json": ("first save", of_file("manifest.json.tmp")),
    "COMMIT": ("tagged save", of_file("COMMIT.tmp")),
    "a component's directory": ("save with links", of_directory(lambda path: path.endswith("/reference_model"))),
    "the staged directory": ("first save", of_directory(lambda path: path.split("/")[-2] == "staging")),
    "the directory of checkpoints": ("save with links", of_directory(lambda path: path.endswith("/checkpoints"))),
    "its parent": ("first save", of_directory(lambda path: "checkpoints" not in path)),
    "before the trash is emptied": ("retention", of_directory(lambda path: path.endswith("/checkpoints"))),
}


@pytest.mark.parametrize("needed", NEEDED)
def test_without_any_one_sync_a_power_cut_does_harm(needed):
    name, skips = NEEDED[needed]
    scenario = BY_NAME[name]
    assert cut_everywhere(scenario, traced(scenario, skips), is_first_enough=True)[1] != []
