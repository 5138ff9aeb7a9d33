"""Whether two trainings are the same, whatever engine, sharding, kind of episodes or resume each of them had.

run_course(run, prompts, directory)   steps on given prompts, driven here, with every text and weight
fit(course(...), run_dir), saved(...) a run of a few steps that drives itself and saves each of them
                  └──> Training ──> same_training(a, b)
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer.runs import GRPO_ALGORITHM, JSONL, every_step, ppo_run, step_lines, weights, without_times

from verl.algorithms.algorithm import Algorithm
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.component import BuildContext
from verl.models.pretrained import ModelSource
from verl.rollout.base import GenerationRequest
from verl.trainer.ppo_config import PPORun

STEPS = 4
ROUNDING = 1e-9  # of float64, where work is divided in another way


@dataclass
class Training:
    """What the steps of a training came to.

    Attributes:
        metrics: by step, without times; with those of the evaluation after it where `run_course` drove the steps.
        texts: by step, prompt and sample number -> response.
        weights: float64, of actor and critic after the last step.
        digest: of all that the newest checkpoint holds.
    """

    metrics: dict[int, dict[str, float]]
    texts: dict[int, dict[tuple[str, int], str]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    digest: str = ""


def run_course(run: PPORun, prompts: Sequence[Sequence[int]], directory: Path) -> Training:
    """One step for each list of rows of the training prompts."""
    texts, metrics = {}, {}
    with run.build(BuildContext(run_dir=directory)) as trainer:
        for step, rows in enumerate(prompts, start=1):
            batch = trainer.train_data.collate(rows)
            drawn: Any = trainer.sampling.generate(batch, GenerationRequest(step, run.trainer.group_size))
            keys = zip(drawn["prompt_text"], drawn["sample_ids"].tolist(), strict=True)
            texts[step] = dict(zip(keys, drawn["response_text"], strict=True))
            metrics[step] = trainer.step(batch, step) | trainer.evaluate(step)
        trainer.save(directory)
    return Training(metrics, texts, weights(directory))


def saved(directory: Path, run: str = "run") -> Training:
    """What a course in `directory` has written; `run` is its run directory there."""
    return Training(numbers(directory / run), digest=digest(directory))


def same_training(left: Training, right: Training, tolerance: float = 0.0, after: int = 0) -> None:
    """Assert that texts and checkpoints are equal, and metrics and weights within `tolerance`.

    Args:
        after: the step after which the left one goes on from the right one.
    """
    assert left.texts == right.texts
    rest = {step: line for step, line in right.metrics.items() if step > after}
    assert left.metrics.keys() == rest.keys()
    for step, line in left.metrics.items():
        assert line.keys() == rest[step].keys()
        differing = {
            key: (x, rest[step][key]) for key, x in line.items() if not _is_near(x, rest[step][key], tolerance)
        }
        assert differing == {}, f"step {step}: {differing}"
    assert left.weights.keys() == right.weights.keys()
    gaps = {name: float((x - right.weights[name]).abs().max()) for name, x in left.weights.items()}
    assert {name: gap for name, gap in gaps.items() if not gap <= tolerance} == {}
    assert all(x.dtype == torch.float64 for x in left.weights.values())
    assert left.digest == right.digest


def _is_near(left: Any, right: Any, tolerance: float) -> bool:
    return left == right or (not isinstance(left, str) and abs(left - right) <= tolerance)


def same_but_for_rounding(left: Training, right: Training) -> None:
    """Assert that texts are equal, and that losses and gradients differ by no more than float32 does over a few
    steps.
    """
    assert left.texts == right.texts
    assert left.metrics.keys() == right.metrics.keys()
    for step, line in left.metrics.items():
        for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
            one, other = line[name], right.metrics[step][name]
            assert abs(one - other) <= 2e-5 * max(1.0, abs(one)), (step, name, one, other)


def course(
    model: ModelSource,
    directory: Path,
    algorithm: Algorithm = GRPO_ALGORITHM,
    resume: str | Path | None = None,
    save: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A run of four steps that saves each of them, in `directory`."""
    options = {"total_steps": STEPS, "tracker": JSONL, "save_final": False, **options}
    run = ppo_run(model, algorithm, **options)
    checkpoint = every_step(directory, **(save or {}))
    return dataclasses.replace(run, checkpoint=checkpoint, resume=None if resume is None else str(resume))


def compared(directory: Path) -> Training:
    """The numbers and the weights of a run, wherever its roles were."""
    files = weights(newest(directory).directory / "actor")
    tensors = {name.partition(":")[2]: x for name, x in files.items()}  # in whatever files
    return Training(numbers(directory / "run"), weights=tensors)


def newest(directory: Path) -> Checkpoint:
    return CheckpointDirectory(directory / "checkpoints").newest()


def digest(directory: Path) -> str:
    return CheckpointReader(newest(directory)).digest()


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, times aside."""
    return {line["step"]: without_times(line) for line in step_lines(run_dir)}
