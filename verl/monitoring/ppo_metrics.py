"""Metrics of a policy-gradient step, of its episodes, and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.monitoring.nonfinite import is_finite
from verl.ops.logprobs import LogProbGap
from verl.ops.masking import masked_mean
from verl.protocol import DataProto

OUTCOMES = ("ok", "tool_error", "timeout", "infra")  # of the calls of episodes
ENDS = ("terminated", "truncated", "timeout", "turns", "tokens", "turn_tokens")  # of episodes


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
    if "entropies" in batch:  # otherwise the update tells
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
    greedy: DataProto,
    drawn: DataProto | None,
    k: int,
    success: float,
    without_tools: DataProto | None = None,
    has_tools: bool = True,
) -> dict[str, float]:
    """Metrics of an evaluation.

    Args:
        greedy: one scored response per prompt.
        drawn: k scored responses per prompt, side by side, or None.
        success: a score that counts as right.
        without_tools: one scored response per prompt, where the policy had no tools; or None.
        has_tools: whether there are tools to call.
    """
    scores = _scores(greedy)
    metrics = {
        "eval/accuracy": float((scores >= success).double().mean()),
        "eval/score": float(scores.mean()),
        "eval/response_length_tokens": float(greedy["response_mask"].sum(dim=1).double().mean()),
    }
    metrics |= accuracy_by_calls(greedy, (scores >= success).tolist(), has_tools)
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


def episode_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of the episodes of a batch, by its column `episode`; none where its rows are single turns."""
    records: Any = batch.non_tensor_batch.get("episode")
    if records is None or not len(records):
        return {}
    calls = [call for record in records for call in calls_of(record)]
    seconds = [call["seconds"] for call in calls]
    metrics = {
        "turns": _mean_or_zero([len(record["turns"]) for record in records]),
        "calls": _mean_or_zero([len(calls_of(record)) for record in records]),
        "call_share": _mean_or_zero([bool(calls_of(record)) for record in records]),
        "parse_errors": _mean_or_zero([sum(turn["parse_errors"] for turn in record["turns"]) for record in records]),
        "observation_tokens": _mean_or_zero([sum(turn["observed"] for turn in record["turns"]) for record in records]),
        "call_s": _mean_or_zero(seconds),
        "call_max_s": float(max(seconds, default=0.0)),
        "seconds_max": float(max(record["seconds"] for record in records)),
        "restarts": float(sum(record["attempts"] - 1 for record in records)),
        "left_out": float(sum(record.get("left_out", 0) for record in records)),
    }
    journal = [record["journal"] for record in records if "journal" in record]
    if any(any(counts.values()) for counts in journal):
        metrics |= {f"journal_{name}": float(sum(counts[name] for counts in journal)) for name in journal[0]}
    metrics |= {f"outcome_{name}": _mean_or_zero([call["outcome"] == name for call in calls]) for name in OUTCOMES}
    metrics |= {f"end_{name}": _mean_or_zero([record["end"] == name for record in records]) for name in ENDS}
    return {f"episode/{name}": value for name, value in metrics.items()}


def accuracy_by_calls(batch: DataProto, is_right: Sequence[bool], has_tools: bool) -> dict[str, float]:
    """Accuracy of the episodes of an evaluation that made a call, and of those that made none, if there are tools."""
    records: Any = batch.non_tensor_batch.get("episode")
    if records is None:
        return {}
    has_call = np.array([bool(calls_of(record)) for record in records])
    right = np.asarray(is_right, dtype=float)
    metrics = {"eval/turns": _mean_or_zero([len(record["turns"]) for record in records])}
    if not has_tools and not has_call.any():
        return metrics
    metrics["eval/call_share"] = _mean_or_zero(has_call)
    for name, chosen in (("with_call", has_call), ("without_call", ~has_call)):
        if chosen.any():
            metrics[f"eval/accuracy_{name}"] = float(right[chosen].mean())
    return metrics


def calls_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of tools of an episode."""
    return [call for turn in record["turns"] for call in turn["calls"] if call["name"]]


def _mean_or_zero(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
