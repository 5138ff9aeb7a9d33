"""The loop around every trainer: data order, evaluation, progress, saving, and an orderly end.

evaluate ── [ step ── log ── evaluate every eval_interval steps ] × num_steps ── save ── close
              ^ one batch of the sampler's order
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.data.sampler import EpochSampler
from verl.data.splits import Dataset
from verl.protocol import DataProto
from verl.safety.guard import Guard, StepSkipped
from verl.tracking.trackers import TrackerSet
from verl.trainer.profiling import Profiler
from verl.trainer.settings import LoopSettings
from verl.trainer.stages import Stages
from verl.utils.redact import redact

_log = logging.getLogger(__name__)


class Trainer(Protocol):
    """What the loop needs of a trainer."""

    settings: LoopSettings
    tracker: TrackerSet
    stages: Stages
    guard: Guard
    train_data: Dataset
    eval_data: Dataset | None
    sampler: EpochSampler
    num_steps: int
    run_dir: Path
    description: Any  # the run's description, written beside the results

    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One training step, number `step` from 1; returns its metrics."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the weights after `step` steps."""
        ...

    def save(self, directory: Path) -> list[Path]:
        """Write the weights below `directory`; returns the directories written."""
        ...


@dataclass
class Result:
    """What a run came to.

    Attributes:
        status: `finished`, `interrupted` or `failed`.
        steps: made in full.
        samples: rows that those steps trained on.
        evaluations: step -> metrics; step 0 is before training.
        wall_s: from the first evaluation to the last.
        train_s: of that, spent in training steps.
        saved: directories of weights; of an interrupted run they may hold a part of the step after `steps`.
        error: what a failed run failed of.
    """

    run_dir: Path
    status: str = "failed"
    steps: int = 0
    samples: int = 0
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    train_s: float = 0.0
    saved: list[Path] = field(default_factory=list)
    error: str | None = None

    def write(self) -> None:
        """Write `summary.json` into the run's directory."""
        plain = {**vars(self), "run_dir": str(self.run_dir), "saved": [str(path) for path in self.saved]}
        file = self.run_dir / "summary.json"
        unfinished = file.with_name("summary.json.unfinished")
        try:
            unfinished.write_text(json.dumps(plain, indent=2) + "\n")
            unfinished.replace(file)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def fit(trainer: Trainer, config: dict[str, Any]) -> Result:
    """Train to the end.

    On Ctrl-C, what is finished is written (weights, metrics, curves, summary) before KeyboardInterrupt goes on its way.
    """
    result = Result(run_dir=trainer.run_dir)
    settings, started = trainer.settings, time.perf_counter()
    name = f"{settings.project_name}/{settings.experiment_name}"
    trainer.tracker.start(name, config, trainer.run_dir, trainer.num_steps)
    try:
        _train(trainer, result)
        result.status = "finished"
    except KeyboardInterrupt:
        result.status = "interrupted"
        trainer.tracker.message(
            f"Interrupted in step {result.steps + 1}: writing what is finished. The weights may hold a part of it."
        )
        raise
    except Exception as error:
        result.error = redact(f"{type(error).__name__}: {error}")
        _log.exception("The run failed after step %d.", result.steps)
        raise
    finally:
        result.wall_s = time.perf_counter() - started
        _finish(trainer, result)
    return result


def _train(trainer: Trainer, result: Result) -> None:
    settings = trainer.settings
    if settings.eval_before:
        _evaluate(trainer, 0, result)
    with closing(Profiler(settings.profile, trainer.run_dir)) as profiler:
        _steps(trainer, result, profiler)


def _steps(trainer: Trainer, result: Result, profiler: Profiler) -> None:
    settings, rows = trainer.settings, None
    for step in range(1, trainer.num_steps + 1):
        started = time.perf_counter()
        if rows is None or not settings.repeat_first_batch:
            rows = trainer.sampler.next_batch()
        with profiler.step(step):
            metrics = _step(trainer, trainer.train_data.collate(rows), step)
            took = time.perf_counter() - started
        metrics |= {
            **trainer.stages.take(),
            "timing/step_s": took,
            "perf/samples_per_s": metrics["perf/samples"] / took,
        }
        trainer.tracker.log(metrics, step)
        result.steps, result.last_metrics = step, metrics
        result.samples += int(metrics["perf/samples"])
        result.train_s += took
        if step == trainer.num_steps or (settings.eval_interval and step % settings.eval_interval == 0):
            _evaluate(trainer, step, result)


def _step(trainer: Trainer, batch: DataProto, step: int) -> dict[str, float]:
    trainer.guard.step = step
    try:
        metrics = trainer.step(batch, step)
    except StepSkipped:
        metrics = {"perf/samples": 0.0}
    return metrics | trainer.guard.take()


def _evaluate(trainer: Trainer, step: int, result: Result) -> None:
    if trainer.eval_data is None:
        return
    with trainer.stages.stage("eval") as note:
        metrics = trainer.evaluate(step)
        note.say(f"the weights after {step} steps")
    if metrics:
        result.evaluations[step] = metrics
        trainer.tracker.evaluation(metrics, step)
    trainer.stages.take()


def _finish(trainer: Trainer, result: Result) -> None:
    """Write the weights and the summary, and close the trackers, each even if what comes before it fails."""
    with ExitStack() as ending:
        ending.callback(lambda: trainer.tracker.close(result.status))
        ending.callback(result.write)
        if result.status != "failed" and result.steps and trainer.settings.save_final:
            status, result.status = result.status, "failed"  # unless the weights are written
            _save(trainer, result)
            result.status = status


def _save(trainer: Trainer, result: Result) -> None:
    with trainer.stages.stage("save") as note:
        result.saved = trainer.save(trainer.run_dir)
        note.say(", ".join(str(path) for path in result.saved))
