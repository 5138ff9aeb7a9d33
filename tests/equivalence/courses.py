"""A few training steps on given prompts, with all that can be seen of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer.runs import weights

from verl.component import BuildContext
from verl.rollout.base import GenerationRequest
from verl.trainer.ppo_config import PPORun


@dataclass
class Course:
    """What a few steps came to.

    Attributes:
        texts: of each step, prompt and sample number -> response.
        metrics: of each step, and of the evaluations after it.
        weights: of actor and critic after the last step.
    """

    texts: list[dict[tuple[str, int], str]]
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


def run_course(run: PPORun, prompts: Sequence[Sequence[int]], directory: Path) -> Course:
    """One step for each list of rows of the training prompts."""
    texts, metrics = [], []
    with run.build(BuildContext(run_dir=directory)) as trainer:
        for step, rows in enumerate(prompts, start=1):
            batch = trainer.train_data.collate(rows)
            drawn: Any = trainer.generate(batch, GenerationRequest(step, run.trainer.group_size))
            keys = zip(drawn["prompt_text"], drawn["sample_ids"].tolist(), strict=True)
            texts.append(dict(zip(keys, drawn["response_text"], strict=True)))
            metrics.append(trainer.step(batch, step) | trainer.evaluate(step))
        trainer.save(directory)
    return Course(texts, metrics, weights(directory))


def assert_same(left: Course, right: Course, tolerance: float = 1e-9) -> None:
    """The same texts; metrics and weights within `tolerance`."""
    assert left.texts == right.texts
    for step, (one, other) in enumerate(zip(left.metrics, right.metrics, strict=True), start=1):
        assert one.keys() == other.keys()
        differing = {name: (one[name], other[name]) for name in one if not abs(one[name] - other[name]) <= tolerance}
        assert differing == {}, f"step {step}: {differing}"
    assert left.weights.keys() == right.weights.keys()
    gaps = {name: float((x - right.weights[name]).abs().max()) for name, x in left.weights.items()}
    assert {name: gap for name, gap in gaps.items() if not gap <= tolerance} == {}
    assert all(x.dtype == torch.float64 for name, x in left.weights.items())


def assert_rounding_alone(left: Course, right: Course) -> None:
    """The same texts, and losses and gradients that differ by no more than float32 does over a few steps."""
    assert left.texts == right.texts
    for step, (one, other) in enumerate(zip(left.metrics, right.metrics, strict=True), start=1):
        for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
            gap = abs(one[name] - other[name])
            assert gap <= 2e-5 * max(1.0, abs(one[name])), (step, name, one[name], other[name])
