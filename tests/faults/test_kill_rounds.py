"""A trainer that saves every step is killed at random moments, again and again, and ends as the one that was not."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from faults.courses import COURSES, first_difference, steps_saved
from faults.fork_server import Child, ForkServer
from faults.scenarios import fast_directory
from faults.test_killed_training import group_of

pytestmark = pytest.mark.slow

STEPS = 10
STOPPED_S = 0.5  # several times the time between two saves


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with fast_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def whole(server, dir32, base) -> Path:
    """The uninterrupted twin."""
    directory = base / "whole"
    child = started(server, dir32, directory, "run", "async")
    assert child.wait() == 0, child.said()
    assert steps_saved(directory) == list(range(1, STEPS + 1))
    return directory


def started(server: ForkServer, model: Path, directory: Path, name: str, mode: str) -> Child:
    directory.mkdir(exist_ok=True)
    course = dataclasses.replace(COURSES["ppo"], mode=mode)
    return server.start(directory, name, course.arguments(model, directory, STEPS))


class Life:
    """A training from its first step to its last, in as many runs as that takes."""

    def __init__(self, server: ForkServer, model: Path, directory: Path, coin: random.Random):
        self.server, self.model, self.directory, self.coin = server, model, directory, coin
        self.is_over, self._num_runs = False, 0

    def round(self, kills: Counter[str]) -> None:
        """Start or resume it, and kill it at a random moment, unless it has ended by then."""
        mode = self.coin.choice(["async", "incremental", "sync"])
        staged = self._staged()
        child = self._run(mode)
        if self.coin.random() < 0.25:
            time.sleep(self.coin.uniform(0.0, 1.5))
        else:
            self._wait_for_steps(child, self.coin.randint(1, 3))
            if mode == "async" and self.coin.random() < 0.3:
                kills["of the writer alone"] += self._disturb_writer(child)
            time.sleep(self.coin.uniform(0.0, 0.25))
        child.kill()
        saving, begun = self._staged() - staged, (self._run_dir / "metrics.jsonl").is_file()
        status = child.wait()
        assert status in (0, -signal.SIGKILL), child.said()
        self.is_over = status == 0
        if self.is_over:
            return
        kills["during a save" if saving else "between saves" if begun else "before the first step"] += 1

    def finish(self) -> None:
        """Let it come to its end."""
        child = self._run("async")
        assert child.wait() == 0, child.said()
        self.is_over = True

    @property
    def _run_dir(self) -> Path:
        return self.directory / f"run_{self._num_runs}"

    def _run(self, mode: str) -> Child:
        self._num_runs += 1
        return started(self.server, self.model, self.directory, self._run_dir.name, mode)

    def _staged(self) -> set[str]:
        with suppress(FileNotFoundError):
            return set(os.listdir(self.directory / "checkpoints/staging"))
        return set()

    def _wait_for_steps(self, child: Child, count: int) -> None:
        lines, end = self._run_dir / "metrics.jsonl", time.monotonic() + 120
        while child.is_running() and time.monotonic() < end:
            if lines.is_file() and lines.read_bytes().count(b"actor/loss") >= count:
                return
            time.sleep(0.005)

    def _disturb_writer(self, child: Child) -> int:
        """Kill the writer process, or stop it for longer than it takes to the next save. Returns whether it could."""
        writers = writers_of(child)
        with suppress(ProcessLookupError):
            for pid in writers:
                if self.coin.random() < 0.5:
                    os.kill(pid, signal.SIGKILL)
                else:
                    stop_for_a_while(pid)
        return len(writers)


def writers_of(child: Child) -> list[int]:
    """The processes that write its checkpoints: one, or none yet."""
    found = []
    for pid in group_of(child.pid) - {child.pid}:
        with suppress(OSError):
            if b"writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def stop_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.exhaustive  # test_cuts.py cuts a run in `make test`, test_killed_episodes.py kills one
@pytest.mark.parametrize(("rounds", "seed"), [(3, 1), (200, 2)])
def test_a_training_killed_in_many_rounds_is_the_one_that_was_never_killed(
    rounds, seed, server, dir32, whole, base, record_property
):
    coin, kills, lives = random.Random(seed), Counter(), []
    while (killed := sum(kills.values()) - kills["of the writer alone"]) < rounds or not lives[-1].is_over:
        if not lives or lives[-1].is_over:
            lives.append(Life(server, dir32, base / f"life_{seed}_{len(lives)}", coin))
        if killed < rounds:
            lives[-1].round(kills)
        else:
            lives[-1].finish()
    for life in lives:
        assert first_difference(whole, life.directory) is None
        assert set(steps_saved(life.directory)) == set(range(1, STEPS + 1))
    record_property("fault_cases", sum(kills.values()))
    told = ", ".join(f"{count} {when}" for when, count in kills.most_common())
    record_property("told", f"{killed} kills of a trainer in {len(lives)} trainings: {told}")
