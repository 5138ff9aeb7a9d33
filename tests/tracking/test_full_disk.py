"""A disk that is full for a while: training goes on, no line is torn, and no line of the metrics is missing."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer.runs import GRPO_ALGORITHM, Arbitrary, Prompts, ppo_run, read_lines

from verl.component import BuildContext, component
from verl.rewards.base import Reward, RewardDescription
from verl.tracking.base import Trackers, TrackerSet
from verl.tracking.jsonl import JsonLines, JsonLinesTracker
from verl.tracking.logging_setup import setup_logging
from verl.tracking.tensorboard import TensorBoard


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            assert os.statvfs(disk).f_bavail == 0


def free(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)


@component
class FillingReward(RewardDescription, Reward):
    """Arbitrary scores; the disk is full between two of the calls, and room is made again if `frees`."""

    disk: str
    full_from: int
    free_from: int | None

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        counter = Path(self.disk).parent / "calls"
        calls = int(counter.read_text()) + 1 if counter.exists() else 1
        counter.write_text(str(calls))
        if calls == self.full_from:
            fill(Path(self.disk))
        if calls == self.free_from:
            free(Path(self.disk))
        return Arbitrary().score(prompts, responses)


def fit(model, disk: Path, full_from: int, free_from: int | None, **options):
    trackers = Trackers(jsonl=JsonLines(), tensorboard=TensorBoard())
    reward = FillingReward(disk=str(disk), full_from=full_from, free_from=free_from)
    settings = {"total_steps": 8, "eval_interval": 1, "eval_samples": 0, "eval_before": False} | options
    run = ppo_run(model, GRPO_ALGORITHM, critic=None, reward=reward, data=Prompts(), tracker=trackers, **settings)
    undo = setup_logging(disk / "run")
    try:
        with run.build(BuildContext(run_dir=disk / "run")) as trainer:
            return trainer.fit()
    finally:
        undo()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_stays_full_stops_the_training_of_nothing_and_tears_no_line(model32, disk, capfd):
    assert fit(model32, disk, full_from=4, free_from=None, save_final=False).status == "finished"
    assert "summary.json cannot be written" in capfd.readouterr().out
    lines = read_lines(disk / "run" / "metrics.jsonl")  # every line is whole
    assert [line["step"] for line in lines][:2] == [1, 1]
    assert (disk.parent / "calls").read_text() == "16"  # all steps were made
    assert not list((disk / "run").glob("summary.json*"))


def test_lines_that_waited_are_written_in_order_and_the_oldest_go_when_memory_runs_out(disk, caplog, monkeypatch):
    monkeypatch.setattr("verl.tracking.jsonl.KEPT_BYTES", 400)
    trackers = TrackerSet({"jsonl": JsonLinesTracker()})
    trackers.start("run", {}, disk, None)
    trackers.log({"a": 0.0}, 0)
    fill(disk)
    with (disk / "metrics.jsonl").open("ab", buffering=0) as file:  # the rest of its last page
        file.write(b" " * (4096 - (disk / "metrics.jsonl").stat().st_size - 1) + b"\n")
    for step in range(1, 21):
        trackers.log({"a": float(step)}, step)
    free(disk)
    trackers.log({"a": 21.0}, 21)
    trackers.close()
    steps = [json.loads(line)["step"] for line in (disk / "metrics.jsonl").read_text().splitlines() if line.strip()]
    assert steps == [0, *range(steps[1], 22)]
    assert 1 < steps[1] < 20
    assert f"lost {steps[1] - 1} records" in caplog.text
