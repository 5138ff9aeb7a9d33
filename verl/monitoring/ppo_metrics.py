"""Metrics of a policy-gradient step and of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.monitoring.episode_metrics import accuracy_by_calls, episode_metrics
from verl.monitoring.nonfinite import is_finite
from verl.ops.logprobs import LogProbGap
from verl.ops.masking import masked_mean
from verl.protocol import DataProto


def experience_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of the responses of a step, before the update; keys are explained in docs/metrics.md."""
    mask, scores = batch["response_mask"], _scores(batch)
    lengths = mask.sum(dim=1).double()
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "rollout/response_length_tokens": float(lengths.mean()),
        "rollout/response_length_max_tokens": float(lengths.max()),
        "advantages/mean": _mean(batch["advantages"], mask),
        "perf/samples": float(len(batch)),
        "perf/tokens": float(lengths.sum()),
    }
    if "old_log_probs" in batch:  # otherwise the update tells
        gap = LogProbGap()
        gap.add(batch["rollout_log_probs"], batch["old_log_probs"], mask, batch.batch.get("is_on_policy"))
        metrics |= {"rollout/entropy_nats": _mean(batch["entropies"], mask), **gap.metrics(gap.sums())}
    parts = [name for name in batch.non_tensor_batch if name.startswith("reward/")]
    metrics |= {name: float(batch[name].astype(float).mean()) for name in parts}
    metrics |= episode_metrics(batch)
    if "contexts" in batch:
        metrics["episode/samples"] = float((batch["contexts"] >= 0).any(dim=2).sum()) / len(batch)
    if "values" in batch:
        metrics["critic/explained_variance"] = _explained_variance(batch["values"][mask], batch["returns"][mask])
    return metrics


def evaluation_keys(k: int, has_episodes: bool) -> list[str]:
    """The keys that `evaluation_metrics` may have, for k responses per prompt."""
    keys = ["eval/accuracy", "eval/score", "eval/response_length_tokens"]
    keys += [f"eval/{name}@{k}" for name in ("mean", "best") if k]
    of_episodes = ("turns", "call_share", "accuracy_with_call", "accuracy_without_call", "accuracy_without_tools")
    return keys + [f"eval/{name}" for name in of_episodes if has_episodes]


def evaluation_metrics(
    greedy: DataProto, drawn: DataProto | None, k: int, success: float, without_tools: DataProto | None = None
) -> dict[str, float]:
    """Metrics of an evaluation.

    Args:
        greedy: one scored response per prompt.
        drawn: k scored responses per prompt, side by side, or None.
        success: a score that counts as right.
        without_tools: one scored response per prompt, where the policy had no tools; or None.
    """
    scores = _scores(greedy)
    metrics = {
        "eval/accuracy": float((scores >= success).double().mean()),
        "eval/score": float(scores.mean()),
        "eval/response_length_tokens": float(greedy["response_mask"].sum(dim=1).double().mean()),
    }
    metrics |= accuracy_by_calls(greedy, (scores >= success).tolist())
    if without_tools is not None:
        metrics["eval/accuracy_without_tools"] = float((_scores(without_tools) >= success).double().mean())
    if drawn is not None:
        right = (_scores(drawn) >= success).double().view(-1, k)
        metrics |= {f"eval/mean@{k}": float(right.mean()), f"eval/best@{k}": float(right.amax(dim=1).mean())}
    return metrics


def sample_rows(batch: DataProto, count: int) -> list[dict[str, Any]]:
    """The first rows of a scored batch as a table: prompt, response, score and the columns of the data."""
    columns = batch.non_tensor_batch
    first = ["prompt_text", "response_text", "score"]
    names = [*first, *(name for name in columns if name not in (*first, "prompt_messages"))]  # the text says the same
    return [{name: columns[name][row] for name in names} for row in range(min(count, len(batch)))]


def mean_of(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one training step: those that were made, or all where none was.

    A metric that some of them lack, such as one of a user's loss, is the mean of the others.
    """
    metrics = [m for m in metrics if is_finite(m)] or metrics
    values = {name: [m[name] for m in metrics if name in m] for step_metrics in metrics for name in step_metrics}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _scores(batch: DataProto) -> Tensor:
    return torch.tensor(batch["score"].astype(float))


def _mean(x: Tensor, mask: Tensor) -> float:
    """Mean in float64, so that the order of the rows is not seen in it."""
    return float(masked_mean(x.double(), mask))


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that predicts a constant."""
    values, returns = values.double(), returns.double()
    spread = returns.var(unbiased=False)
    return float(1 - (returns - values).var(unbiased=False) / spread) if spread > 0 else 0.0
