"""Long histories: saves, resumes at earlier steps, retention and kills, one after another in one directory."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cases import exhaustive
from faults.disks import KillingDisk, is_killed
from faults.scenarios import check_next_save, fast_directory, save, version_of

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.retention import Retention, prune

LONGEST_SAVE = 100  # operations that change the disk, about


def acted(root: Path, act: Callable[[CheckpointStore], object], disk: KillingDisk) -> bool:
    """Do something in a child process. Whether it came to its end."""
    return not is_killed(lambda: act(CheckpointStore(root, "run", disk)))


def live(root: Path, seed: int, num_acts: int) -> int:
    """Half of all acts are killed somewhere. Returns how many were."""
    dice = random.Random(seed)
    step = version = newest = num_kills = 0
    left: list[int] = []
    for _ in range(num_acts):
        disk = KillingDisk(dice.randrange(2 * LONGEST_SAVE), dice.choice(["before", "within", "after"]))
        if dice.random() < 0.25:
            retention = Retention(keep_last_n=dice.randrange(1, 4))
            is_done = acted(root, partial(prune, retention=retention), disk)
            allowed, fewest = {newest}, min(2, len(left))
        else:
            step = step + 1 if dice.random() < 0.7 else dice.randrange(step + 1)
            version += 1
            is_done = acted(root, partial(save, step=step, version=version), disk)
            allowed, fewest = {version} if is_done else {newest, version}, len(left)
        good, bad = CheckpointStore(root).survey("full")
        left = [version_of(checkpoint) for checkpoint in good]
        assert bad == []
        assert left == sorted(left), "checkpoints are in the order of their publication"
        assert len(left) >= fewest
        newest = left[-1] if left else 0
        assert newest in allowed
        num_kills += not is_done
    return num_kills


@pytest.mark.parametrize("seed", [0, *exhaustive(1, 2)])
def test_a_history_with_kills_never_loses_a_checkpoint(seed, record_property):
    with fast_directory() as base:
        record_property("fault_cases", live(base / "checkpoints", seed, num_acts=12))
        check_next_save(base / "checkpoints")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 116))
def test_a_long_history_with_kills_never_loses_a_checkpoint(seed, record_property):
    with fast_directory() as base:
        record_property("fault_cases", live(base / "checkpoints", seed, num_acts=60))
        check_next_save(base / "checkpoints")
