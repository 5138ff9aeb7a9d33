"""`exit()` in a component, wherever a run calls it, ends the run in words, or is that component's failure."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import exhaustive
from trainer.runs import PPO_ALGORITHM, Prompts, ppo_run, read_lines

import verl
from verl.algorithms.losses import PPOClip
from verl.component import BuildContext, component
from verl.errors import ComponentExit, RewardError
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription
from verl.rewards.function import RewardFunction
from verl.tracking.base import Tracker, TrackerDescription, Trackers
from verl.tracking.jsonl import JsonLines
from verl.utils.signals import component_exits

ROOT = Path(verl.__file__).parents[1]
HERE = r"at line \d+ of .+test_component_exits.py"


def stop(how: str) -> Any:
    if how == "interrupt":
        raise KeyboardInterrupt
    (os._exit if how == "os._exit" else sys.exit)(0)


@component
class ExitingReward(RewardDescription, Reward):
    how: str = "sys.exit"

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        return stop(self.how)


@component
class ExitingLoss(PPOClip):
    def __call__(self, log_probs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return stop("sys.exit")


@component
class ExitingData(Prompts):
    """Prompts whose second batch is never made."""

    def build(self, context: BuildContext) -> Any:
        splits = super().build(context)
        made, calls = splits.train.collate, []

        def collate(rows: Any) -> Any:
            calls.append(rows)
            return made(rows) if len(calls) < 2 else stop("sys.exit")

        splits.train.collate = collate  # pyright: ignore[reportAttributeAccessIssue]
        return splits


@component
class ExitingTracker(TrackerDescription):
    at: str

    def build(self, context: BuildContext) -> Tracker:
        tracker = Tracker()
        setattr(tracker, self.at, lambda *args: stop("sys.exit"))
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
        {"reward": ExitingReward(how="os._exit")},
        *exhaustive(
            {"reward": ExitingReward(how="interrupt")},
            {"data": ExitingData()},
            {"algorithm": dataclasses.replace(PPO_ALGORITHM, policy_loss=ExitingLoss())},
        ),
    ],
)
def test_an_exit_within_a_run_is_its_error_and_names_the_line(parts, model32, tmp_path):
    with pytest.raises(ComponentExit, match=rf"^stop\(\) {HERE} "):
        fit(tmp_path, model32, **parts)
    assert '"status": "failed"' in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize("at", ["log", *exhaustive("close")])
def test_an_exit_of_a_tracker_is_told_and_training_goes_on(at, model32, tmp_path, caplog):
    trackers = Trackers(jsonl=JsonLines(), tensorboard=ExitingTracker(at=at))
    with caplog.at_level(logging.WARNING, "verl"):
        assert fit(tmp_path, model32, tracker=trackers).status == "finished"
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 4
    messages = [record.message for record in caplog.records]
    (warning,) = [text for text in messages if "tensorboard" in text and "Exit" in text]
    assert "test_component_exits.py raised SystemExit(0)" in warning


COMPONENT = """
import os, sys

def batch(prompts, responses):
    {how}

def sample(prompt, response):
    {how}
"""
RUN = ["actor=tiny_scratch", "critic=none", "algorithm=grpo", "trainer.total_steps=1", "trainer.prompts_per_step=2"]
RUN += ["data.digits=1", "data.held_out=2", "data.train_size=4", "rollout.max_new_tokens=2", "tracker=none"]
RUN += ["checkpoint=off"]


SAMPLE = r"Raised at line 4: [\s\S]*Sample: 3,"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sys.exit(0)", SAMPLE),
        ("exit()", SAMPLE),
        ("raise KeyboardInterrupt", SAMPLE),
        ("os._exit(0)", "the process ended with exit status 0"),
    ],
)
def test_an_exit_of_a_reward_function_names_the_sample(how, said, tmp_path):
    (tmp_path / "c.py").write_text(
        f"import os, sys\ndef rate(prompts, responses):\n    if '3' in responses:\n        {how}\n"
        "    return [1.0] * len(prompts)\n"
    )
    texts = [str(number) for number in range(5)]
    batch = DataProto.from_dict(
        {"response_mask": torch.ones(5, 1, dtype=torch.bool)}, {"prompt_text": texts, "response_text": texts}
    )
    reward = RewardFunction(path=f"{tmp_path}/c.py:rate").build(BuildContext())
    with pytest.raises(RewardError, match=said), component_exits():
        reward.score_tokens(batch)
