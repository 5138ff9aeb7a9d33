"""`exit()` in a component, wherever a run calls it, ends the run in words, or is that component's failure."""

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import exhaustive
from trainer.runs import PPO_ALGORITHM, Prompts, ppo_run, read_lines

from verl.algorithms.losses import PPOClip
from verl.component import BuildContext, component
from verl.errors import ComponentExit
from verl.rewards.base import Reward, RewardDescription
from verl.tracking.base import Tracker, TrackerDescription, Trackers
from verl.tracking.jsonl import JsonLines

HERE = r"at line \d+ of .+test_component_exits.py"


def stop() -> Any:
    sys.exit(0)


@component
class ExitingReward(RewardDescription, Reward):
    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        return stop()


@component
class ExitingLoss(PPOClip):
    def __call__(self, log_probs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return stop()


@component
class ExitingData(Prompts):
    """Prompts whose second batch is never made."""

    def build(self, context: BuildContext) -> Any:
        splits = super().build(context)
        made, calls = splits.train.collate, []

        def collate(rows: Any) -> Any:
            calls.append(rows)
            return made(rows) if len(calls) < 2 else stop()

        splits.train.collate = collate  # pyright: ignore[reportAttributeAccessIssue]
        return splits


@component
class ExitingTracker(TrackerDescription):
    at: str

    def build(self, context: BuildContext) -> Tracker:
        tracker = Tracker()
        setattr(tracker, self.at, lambda *args: stop())
        return tracker


def fit(directory: Path, model: Any, **parts: Any) -> Any:
    with ppo_run(model, total_steps=2, eval_samples=0, save_final=False, **parts).build(
        BuildContext(run_dir=directory)
    ) as trainer:
        return trainer.fit()


@pytest.mark.parametrize(
    "parts",
    [
        {"reward": ExitingReward()},
        *exhaustive(
            {"data": ExitingData()}, {"algorithm": dataclasses.replace(PPO_ALGORITHM, policy_loss=ExitingLoss())}
        ),
    ],
)
def test_an_exit_within_a_run_is_its_error_and_names_the_line(parts, model32, tmp_path):
    with pytest.raises(ComponentExit, match=rf"^stop\(\) {HERE} "):
        fit(tmp_path, model32, **parts)
    assert '"status": "failed"' in (tmp_path / "summary.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["log", *exhaustive("close")])
def test_an_exit_of_a_tracker_is_told_and_training_goes_on(at, model32, tmp_path, caplog):
    trackers = Trackers(jsonl=JsonLines(), tensorboard=ExitingTracker(at=at))
    with caplog.at_level(logging.WARNING, "verl"):
        assert fit(tmp_path, model32, tracker=trackers).status == "finished"
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 4
    messages = [record.message for record in caplog.records]
    (warning,) = [text for text in messages if "tensorboard" in text and "Exit" in text]
    assert "test_component_exits.py raised SystemExit(0)" in warning
