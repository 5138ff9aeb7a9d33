"""A training killed on a machine whose disk is then lost goes on from the store, and ends as the undisturbed one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from cli.small_runs import hold_once, small_run
from faults.courses import COURSES, first_difference
from faults.fork_server import Child, ForkServer
from storage.s3_server import BUCKET, Fault, Proxy, Request, wait_until

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.models.pretrained import Pretrained
from verl.trainer.state.compare_runs import Tolerance, first_step_apart, steps_of

pytestmark = pytest.mark.slow

STEPS, KILLED_FROM, HELD_AT = 7, 3, 4
BUFFER = ["replay=tiered", "replay.max_rows=24", "replay.hot_share=0.25", "replay.warm_share=0.25"]
BUFFER += ["replay.cold_share=0.5", "replay.memory_mib=8", "replay.shard_mib=1", "algorithm.replay_fraction=0.5"]
SAVING = ["checkpoint=incremental", "checkpoint.save_interval=1"]
TWO = ["sharding=ddp", "trainer.n_gpus_per_node=2"]


class Machine:
    """A directory that is all there is of a machine; its store outlives it."""

    def __init__(self, directory: Path, model: Pretrained, machines: ForkServer, url: str, prefix: str):
        self.directory, self.model, self.machines, self.url = directory, model, machines, url
        self.prefix = f"{directory.parent.name}/{prefix}"  # tests share a store

    def start(self, name: str, *overrides: str) -> Child:
        self.directory.mkdir(exist_ok=True)
        run = [*small_run(self.model, self.directory), *BUFFER, *SAVING, *at_s3(self.url, self.prefix)]
        run += ["checkpoint.keep_last_n=null", "resume=latest"]
        run += [f"checkpoint.save_dir={self.directory}/checkpoints/killed", f"trainer.total_steps={STEPS}"]
        run += ["trainer.eval_interval=3", "trainer.save_final=false", "trainer.num_threads=1"]
        return self.machines.start(
            self.directory, name, [*run, *overrides], env=os.environ
        )  # has the keys of the store

    def finish(self, name: str, *overrides: str) -> str:
        """Run to the end; what it said."""
        child = self.start(name, *overrides)
        assert child.wait(timeout_s=240) == 0, child.said()
        return child.said()

    @property
    def confirmed(self) -> int:
        """Checkpoints that the store has."""
        return len([*self.directory.glob("checkpoints/killed/uploaded/global_step_*")])

    def digest(self) -> str:
        newest = CheckpointDirectory(self.directory / "checkpoints/killed").newest()
        assert newest is not None
        assert newest.step == STEPS
        return CheckpointReader(newest).digest()


def at_s3(url: str, prefix: str) -> list[str]:
    return ["storage=s3", f"storage.endpoint_url={url}", f"storage.bucket={BUCKET}", f"storage.prefix={prefix}"]


@pytest.mark.exhaustive  # tests/trainer/state/test_save_directory.py loses a disk in `make test`
@pytest.mark.parametrize("ends_on", ["one process", "two processes"])
def test_a_run_whose_disk_is_lost_goes_on_from_the_store(ends_on, server, s3_url, model32, tmp_path):
    whole = Machine(tmp_path / "whole", model32, server, s3_url, "whole")
    undisturbed = whole.start("run")

    lost = Machine(tmp_path / "lost", model32, server, s3_url, "lost")
    lost.directory.mkdir()
    hold_once(lost.directory / f"checkpoints/killed/global_step_{HELD_AT}", lost.directory)  # uploads may be slower
    child = lost.start("run")
    try:
        end = time.monotonic() + 240
        while lost.confirmed < KILLED_FROM:
            assert child.is_running(), child.said()
            assert time.monotonic() < end, "nothing was uploaded"
            time.sleep(0.02)
    finally:
        power_off(child)
    shutil.rmtree(lost.directory)

    told = lost.finish("again")
    assert undisturbed.wait(timeout_s=240) == 0, undisturbed.said()
    resumed = min(steps_of(lost.directory / "again")) - 1
    assert KILLED_FROM <= resumed < STEPS, told
    assert lost.digest() == whole.digest()
    mine, theirs = (_numbers(directory) for directory in (lost.directory / "again", whole.directory / "run"))
    assert sorted(mine) == [*range(resumed + 1, STEPS + 1)]
    assert first_step_apart(theirs, mine, Tolerance()) is None

    if ends_on == "two processes":
        shutil.rmtree(lost.directory)  # and another machine goes on
        lost.finish("elsewhere", *TWO, f"trainer.total_steps={STEPS + 2}")
        assert sorted(steps_of(lost.directory / "elsewhere")) == [STEPS + 1, STEPS + 2]


def power_off(child: Child) -> None:
    """Kill a run with the processes that save and upload for it, which else end a moment later than it does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        run = psutil.Process(child.pid)
        run.suspend()  # so that it starts no more of them
        family = [run, *run.children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        wait_until(lambda: not any(map(_is_running, family)))
    child.wait()


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE  # that nobody waits for
    return False


def _numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics that say what was trained; where rows lie at the moment depends on when threads were done."""
    places = ("replay/rows_", "replay/memory", "sync/", "checkpoint/")
    return {
        step: {name: x for name, x in metrics.items() if not name.startswith(places)}
        for step, metrics in steps_of(run_dir).items()
    }


# Rounds: killed at a random request of an upload, the disk wiped, resumed from the store, again and again

ROUND_STEPS = 6
REQUESTS = 28  # fewer than claim a place in the store and upload the checkpoints of one run


BEFORE = "before the first step"


class PowerCut:
    """The moment at which a machine loses its power: at the n-th request that changes the store.

    Args:
        is_done: the store carries the request out before.
    """

    def __init__(self, number: int, is_done: bool):
        self._number, self._is_done, self._count = number, is_done, 0
        self.has_come = threading.Event()

    def __call__(self, request: Request) -> Fault | None:
        self._count += request.method in ("PUT", "POST", "DELETE")
        if self._count < self._number and not self.has_come.is_set():
            return None
        is_done = self._is_done and not self.has_come.is_set()
        self.has_come.set()
        return Fault(passed_on=is_done, hang_up=True, delay_s=0.3)


class Life:
    """A training from its first step to its last, on as many machines as that takes."""

    def __init__(self, machines: ForkServer, model: Path, proxy: Proxy, directory: Path, prefix: str):
        self._machines, self._model, self._proxy, self._prefix = machines, model, proxy, prefix
        self.directory, self.is_over, self._confirmed = directory, False, 0

    def start(self, mode: str) -> Child:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        course = dataclasses.replace(COURSES["ppo"], mode=mode)
        given = [*course.arguments(self._model, self.directory, ROUND_STEPS), *at_s3(self._proxy.url, self._prefix)]
        return self._machines.start(self.directory, "run", [*given, "storage.retries=0"], env=os.environ)

    def round(self, coin: random.Random, whole: Path, kills: Counter[str]) -> None:
        """A new machine: resume from the store, and lose the power at a random request of an upload."""
        mode = coin.choice(["async", "incremental", "sync"])
        cut = PowerCut(coin.randint(1, REQUESTS), coin.random() < 0.5)
        self._proxy.misbehave = cut
        child = self.start(mode)
        while child.is_running() and not cut.has_come.wait(0.02):
            pass
        power_off(child)
        self._proxy.misbehave = lambda request: None
        self._compare(child, whole)
        if cut.has_come.is_set():
            kills[BEFORE if not self._steps() else f"in an upload of a run with {mode} saves"] += 1
        else:
            assert child.wait() == 0, child.said()
            self.is_over = True

    def finish(self, whole: Path) -> None:
        child = self.start("async")
        assert child.wait(240) == 0, child.said()
        self._compare(child, whole)
        self.is_over = True

    def _compare(self, child: Child, whole: Path) -> None:
        """What this machine trained is what the undisturbed one did, and it began at what the store had, or later."""
        assert first_difference(whole, self.directory) is None
        if steps := self._steps():
            assert min(steps) > self._confirmed, child.said()
        confirmed = self.directory.glob("checkpoints/uploaded/global_step_*")
        self._confirmed = max([self._confirmed, *(int(path.name.rpartition("_")[2]) for path in confirmed)])

    def _steps(self) -> list[int]:
        if not (self.directory / "run/metrics.jsonl").is_file():  # the power failed while the store was looked at
            return []
        return sorted(step for step, numbers in steps_of(self.directory / "run").items() if "actor/loss" in numbers)
