"""A training killed on a machine whose disk is then lost goes on from the store, and ends as the undisturbed one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cli.small_runs import hold_once, small_run
from storage.s3_server import BUCKET

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.models.pretrained import Pretrained
from verl.trainer.state.compare_runs import Tolerance, first_step_apart, steps_of

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLED_FROM, HELD_AT = 10, 4, 6
BUFFER = ["replay=tiered", "replay.max_rows=24", "replay.hot_share=0.25", "replay.warm_share=0.25"]
BUFFER += ["replay.cold_share=0.5", "replay.memory_mib=8", "replay.shard_mib=1", "algorithm.replay_fraction=0.5"]
SAVING = ["checkpoint=incremental", "checkpoint.incremental_pays_below=1", "checkpoint.save_interval=1"]
TWO = ["sharding=ddp", "trainer.n_gpus_per_node=2"]


@pytest.fixture
def store(s3_url: str) -> dict[str, str]:
    """What the environment of a run says of an S3 server."""
    return os.environ | {"AWS_ENDPOINT_URL": s3_url, "VERL_BUCKET": BUCKET}


class Machine:
    """A directory that is all there is of a machine; its store outlives it."""

    def __init__(self, directory: Path, model: Pretrained, store: dict[str, str], prefix: str):
        self.directory, self.model, self.store, self.prefix = directory, model, store, prefix

    def start(self, name: str, *overrides: str) -> subprocess.Popen:
        self.directory.mkdir(exist_ok=True)
        run = [sys.executable, ROOT / "main_ppo.py", *small_run(self.model, self.directory), *BUFFER, *SAVING]
        run += ["storage=s3", f"storage.prefix={self.prefix}", "checkpoint.keep_last_n=null", "resume=latest"]
        run += [f"checkpoint.save_dir={self.directory}/checkpoints/killed", f"trainer.total_steps={STEPS}"]
        run += ["trainer.eval_interval=3", "trainer.save_final=false", "tracker.curves=null", "trainer.num_threads=1"]
        run += [f"hydra.run.dir={self.directory / name}", *overrides]
        with (self.directory.parent / f"{self.prefix}_{name}.log").open("w") as log:
            return subprocess.Popen(run, stdout=log, stderr=subprocess.STDOUT, cwd=self.directory, env=self.store)

    def told(self, name: str) -> str:
        return (self.directory.parent / f"{self.prefix}_{name}.log").read_text()

    def finish(self, name: str, *overrides: str) -> str:
        """Run to the end; the log."""
        assert self.start(name, *overrides).wait(timeout=240) == 0, self.told(name)
        return self.told(name)

    @property
    def confirmed(self) -> int:
        """Checkpoints that the store has."""
        return len([*self.directory.glob("checkpoints/killed/uploaded/global_step_*")])

    def digest(self) -> str:
        newest = CheckpointDirectory(self.directory / "checkpoints/killed").newest()
        assert newest is not None
        assert newest.step == STEPS
        return CheckpointReader(newest).digest()


def test_a_run_whose_disk_is_lost_goes_on_from_the_store(store, model32, tmp_path):
    whole = Machine(tmp_path / "whole", model32, store, "whole")
    whole.finish("run")

    lost = Machine(tmp_path / "lost", model32, store, "lost")
    lost.directory.mkdir()
    hold_once(lost.directory / f"checkpoints/killed/global_step_{HELD_AT}", lost.directory)  # uploads may be slower
    process = lost.start("run")
    try:
        end = time.monotonic() + 240
        while lost.confirmed < KILLED_FROM:
            assert process.poll() is None, lost.told("run")
            assert time.monotonic() < end, "nothing was uploaded"
            time.sleep(0.02)
    finally:
        _power_off(process)
    shutil.rmtree(lost.directory)

    told = lost.finish("again")
    resumed = min(steps_of(lost.directory / "again")) - 1
    assert KILLED_FROM <= resumed < STEPS, told
    assert lost.digest() == whole.digest()
    mine, theirs = (_numbers(directory) for directory in (lost.directory / "again", whole.directory / "run"))
    assert sorted(mine) == [*range(resumed + 1, STEPS + 1)]
    assert first_step_apart(theirs, mine, Tolerance()) is None

    shutil.rmtree(lost.directory)  # and another machine, with two processes
    lost.finish("elsewhere", *TWO, f"trainer.total_steps={STEPS + 2}")
    assert sorted(steps_of(lost.directory / "elsewhere")) == [STEPS + 1, STEPS + 2]


def _power_off(process: subprocess.Popen) -> None:
    """Kill a run with the processes that save and upload for it, which else end a moment later than it does."""
    run = psutil.Process(process.pid)
    run.suspend()  # so that it starts no more of them
    family = [run, *run.children(recursive=True)]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)  # those that nobody waits for stay as names


def _numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics that say what was trained; where rows lie at the moment depends on when threads were done."""
    places = ("replay/rows_", "replay/memory", "sync/", "checkpoint/")
    return {
        step: {name: x for name, x in metrics.items() if not name.startswith(places)}
        for step, metrics in steps_of(run_dir).items()
    }
