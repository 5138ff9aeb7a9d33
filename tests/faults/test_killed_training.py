"""A training killed at any moment and started again with `resume=latest` ends as the one that was never killed."""

import json
import random
import time
from pathlib import Path

import pytest
from cli.small_runs import small_run
from faults.fork_server import Child, ForkServer

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader

pytestmark = pytest.mark.slow

STEPS = 12
ASYNC_STEPS = 60
CORRECTION = "+algorithm.correction.level=token"
ASYNC = ["trainer.mode=async", CORRECTION, f"trainer.total_steps={ASYNC_STEPS}", "rollout.max_new_tokens=24"]

GAMES = [  # of several turns; random weights seldom end one by themselves
    "environment={_target_:environments.digit_game.DigitGames,answers_at_once:true,max_tokens:40,max_turns:4}",
    f"rollout.stop_token_ids={list(range(12, 40))}",
]


def started(server: ForkServer, model, directory: Path, name: str, *overrides: str) -> Child:
    """A run that saves each step, so that most moments lie within a save."""
    quiet = ["tracker.tensorboard=null"]
    saving = [f"checkpoint.save_dir={directory / 'checkpoints'}", "checkpoint.save_interval=1", "resume=latest"]
    length = [f"trainer.total_steps={STEPS}", "trainer.eval_interval=3", "trainer.save_final=false"]
    return server.start(directory, name, [*small_run(model, directory), *quiet, *saving, *length, *overrides])


def digest(directory: Path, steps: int = STEPS) -> str:
    newest = CheckpointDirectory(directory / "checkpoints").newest()
    assert newest.step == steps
    return CheckpointReader(newest).digest()


def wait_for_training(process: Child, run_dir: Path) -> None:
    """Until the first line of metrics; or the end of the run."""
    end = time.monotonic() + 240
    while process.is_running() and not (run_dir / "metrics.jsonl").is_file():
        assert time.monotonic() < end, "no step was made"
        time.sleep(0.01)


def killed_twenty_times(
    server: ForkServer, model, directory: Path, overrides: list[str], seed: int
) -> tuple[Path, int]:
    """Start a run until it ends by itself; returns the directory of its last start, and how often it was killed."""
    moments, kills = random.Random(seed), 0
    for attempt in range(100):
        process = started(server, model, directory, f"run_{attempt}", *overrides)
        try:
            wait_for_training(process, directory / f"run_{attempt}")
            if kills < 20:
                time.sleep(moments.uniform(0.0, 3.0))
                kills += process.is_running()
                process.kill()
        finally:
            status = process.wait(480)
            process.kill()
        if status == 0:
            return directory / f"run_{attempt}", kills
    raise AssertionError((directory / "run_99.log").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kv_cache", "episodes"), [("keep", []), ("recompute", []), ("recompute", GAMES), ("keep", GAMES)]
)
def test_a_training_in_flight_killed_twenty_times_ends_as_its_schedule_replayed_without_kills(
    kv_cache, episodes, server, model32, tmp_path
):
    overrides = ["checkpoint=async", "critic=none", "algorithm=grpo", "trainer.max_staleness=2", *ASYNC, *episodes]
    overrides += ["rollout.weight_update=in_flight", f"rollout.kv_cache={kv_cache}"]
    (tmp_path / "twin").mkdir()
    (tmp_path / "cut").mkdir()
    last, kills = killed_twenty_times(server, model32, tmp_path / "cut", overrides, 7)
    twin = started(server, model32, tmp_path / "twin", "run", *overrides, f"trainer.replay_schedule={last}")
    assert twin.wait(480) == 0, (tmp_path / "twin/run.log").read_text()
    schedule = (last / "schedule.jsonl").read_bytes()
    assert (tmp_path / "twin/run/schedule.jsonl").read_bytes() == schedule
    events = [json.loads(line) for line in schedule.splitlines()[1:]]
    assert [event["number"] for event in events if event.get("event") == "begin"] == list(range(1, ASYNC_STEPS + 1))
    assert digest(tmp_path / "cut", ASYNC_STEPS) == digest(tmp_path / "twin", ASYNC_STEPS)
    assert kills >= 12
