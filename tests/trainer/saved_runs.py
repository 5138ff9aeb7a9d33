"""Short runs that save each step, and what is compared of two of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainer.runs import GRPO_ALGORITHM, ppo_run, read_lines, without_times

from verl.algorithms.algorithm import Algorithm
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.component import BuildContext
from verl.models.pretrained import ModelSource
from verl.tracking.base import Trackers
from verl.tracking.jsonl import JsonLines
from verl.trainer.train_loop import TrainResult

STEPS = 4


def course(
    model: ModelSource,
    directory: Path,
    algorithm: Algorithm = GRPO_ALGORITHM,
    resume: str | None = None,
    save: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A run of four steps that saves each of them, in `directory`."""
    saving = {"save_dir": str(directory / "checkpoints"), "save_interval": 1, "keep_last_n": None, "save_async": False}
    options = {"total_steps": STEPS, "tracker": Trackers(jsonl=JsonLines()), "save_final": False, **options}
    run = ppo_run(model, algorithm, **options)
    return dataclasses.replace(run, checkpoint=Checkpointing(**saving | (save or {})), resume=resume)


def fit(run: Any, directory: Path) -> TrainResult:
    with run.build(BuildContext(run_dir=directory)) as trainer:
        return trainer.fit()


def newest(directory: Path) -> Checkpoint:
    return CheckpointDirectory(directory / "checkpoints").newest()


def digest(directory: Path) -> str:
    return CheckpointReader(newest(directory)).digest()


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, times aside."""
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "actor/loss" in line]
    return {line["step"]: without_times(line) for line in lines}
