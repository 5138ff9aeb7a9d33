"""A training killed inside of its episodes and resumed ends as the one that was never killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from faults.courses import QUIET
from faults.fork_server import Child, Cut, ForkServer
from faults.scenarios import fast_directory

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader

pytestmark = pytest.mark.slow

STEPS = 4
JOURNAL = "verl.environments.journal:EpisodeJournal"


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with fast_directory() as directory:
        yield directory


class Training:
    """One training in as many runs as it takes."""

    def __init__(
        self,
        server: ForkServer,
        directory: Path,
        arguments: Sequence[str],
        steps: int = STEPS,
        timeout_s: float = 120.0,
    ):
        self.server, self.directory, self.num_runs, self.steps = server, directory, 0, steps
        self.timeout_s = timeout_s
        directory.mkdir()
        self.arguments = [
            *arguments, f"trainer.total_steps={steps}", *QUIET, "checkpoint=sync", "checkpoint.keep_last_n=null",
            f"checkpoint.save_dir={directory}/checkpoints", "trainer.save_final=false", "resume=latest",
        ]  # fmt: skip

    @classmethod
    def small(cls, server: ForkServer, model: Path, directory: Path, recovery: str, save_interval: int = 2) -> Training:
        """Random weights, four steps, an environment of the tests that names its kind of recovery."""
        environment = f"{{_target_:environments.digit_game.DigitGames,recovery:{recovery},max_tokens:40,max_turns:4}}"
        letters = list(range(12, 60))  # any of them ends a turn: random weights seldom end one by themselves
        arguments = [
            f"environment={environment}", "reward=environment", "actor=pretrained", f"actor.model.path={model}",
            "algorithm=grpo", "algorithm.mini_batches=2", "actor.optimizer.lr=1e-3", "trainer.group_size=4",
            "trainer.prompts_per_step=4", "data.digits=1", "data.held_out=2", "data.train_size=12",
            "rollout.max_new_tokens=6", f"rollout.stop_token_ids={letters}", "trainer.num_threads=1",
            "trainer.eval_samples=0", "trainer.eval_interval=2", f"checkpoint.save_interval={save_interval}",
        ]  # fmt: skip
        return cls(server, directory, arguments)

    def start(self, cut: Cut | None = None) -> Child:
        self.num_runs += 1
        return self.server.start(self.directory, f"run_{self.num_runs}", self.arguments, cut=cut)

    def cut_at(self, cut: Cut) -> None:
        child = self.start(cut)
        assert child.wait() == -signal.SIGKILL, child.said()

    def finish(self) -> None:
        child = self.start()
        assert child.wait(self.timeout_s) == 0, child.said()

    def digest(self) -> str:
        newest = CheckpointDirectory(self.directory / "checkpoints").newest()
        assert newest.step == self.steps
        return CheckpointReader(newest).digest()

    def counted(self, name: str) -> float:
        """Sum of a metric over all steps of all runs."""
        files = self.directory.glob("run_*/metrics.jsonl")
        lines = [json.loads(text) for file in files for text in file.read_text().splitlines()]
        return sum(line.get(name, 0.0) for line in lines)

    def num_answers(self) -> int:
        return sum(
            path.read_bytes().count(b'"answer"') for path in self.directory.glob("checkpoints/episode_journal/*")
        )


@pytest.fixture(scope="module")
def whole(server, dir32, base):
    """Of each kind of environment, the training that was not killed."""
    made: dict[str, Training] = {}

    def training(recovery: str) -> Training:
        if recovery not in made:
            made[recovery] = Training.small(server, dir32, base / f"whole_{recovery}", recovery)
            made[recovery].finish()
        return made[recovery]

    return training


@pytest.mark.parametrize(
    "recovery",
    ["deterministic", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("stateless", "restart"))],
)
def test_kills_inside_of_episodes_leave_no_trace(recovery, whole, server, dir32, base):
    training = Training.small(server, dir32, base / f"cut_{recovery}", recovery)
    training.cut_at(Cut(f"{JOURNAL}.write_turn", step=1, call=9))
    training.cut_at(Cut(f"{JOURNAL}.write_answer", step=3, call=30, after=True))
    training.finish()
    assert training.digest() == whole(recovery).digest()
    assert training.num_answers() > 60
    counts = {name: training.counted(f"episode/journal_{name}") for name in ("reused", "replayed", "restarted")}
    expected = {"deterministic": "replayed", "stateless": "reused", "restart": "restarted"}[recovery]
    assert counts[expected] > 0  # how many had been written at the kill is a matter of time
    if recovery == "deterministic":
        assert counts["restarted"] == 0
