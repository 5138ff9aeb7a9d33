"""Metrics of episodes: turns, calls and their outcomes, and how episodes ended; read from the column `episode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.protocol import DataProto

OUTCOMES = ("ok", "tool_error", "timeout", "infra")
ENDS = ("terminated", "truncated", "timeout", "turns", "tokens", "turn_tokens")


def episode_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of the episodes of a batch; none where its rows are single turns."""
    records: Any = batch.non_tensor_batch.get("episode")
    if records is None or not len(records):
        return {}
    calls = [call for record in records for call in calls_of(record)]
    seconds = [call["seconds"] for call in calls]
    metrics = {
        "turns": _mean([len(record["turns"]) for record in records]),
        "calls": _mean([len(calls_of(record)) for record in records]),
        "call_share": _mean([bool(calls_of(record)) for record in records]),
        "parse_errors": _mean([sum(turn["parse_errors"] for turn in record["turns"]) for record in records]),
        "observation_tokens": _mean([sum(turn["observed"] for turn in record["turns"]) for record in records]),
        "call_s": _mean(seconds),
        "call_max_s": float(max(seconds, default=0.0)),
        "seconds_max": float(max(record["seconds"] for record in records)),
        "restarts": float(sum(record["attempts"] - 1 for record in records)),
        "left_out": float(sum(record.get("left_out", 0) for record in records)),
    }
    journal = [record["journal"] for record in records if "journal" in record]
    if any(any(counts.values()) for counts in journal):
        metrics |= {f"journal_{name}": float(sum(counts[name] for counts in journal)) for name in journal[0]}
    metrics |= {f"outcome_{name}": _mean([call["outcome"] == name for call in calls]) for name in OUTCOMES}
    metrics |= {f"end_{name}": _mean([record["end"] == name for record in records]) for name in ENDS}
    return {f"episode/{name}": value for name, value in metrics.items()}


def accuracy_by_calls(batch: DataProto, is_right: Sequence[bool]) -> dict[str, float]:
    """Accuracy of the episodes of an evaluation that made a call, and of those that made none."""
    records: Any = batch.non_tensor_batch.get("episode")
    if records is None:
        return {}
    has_call = np.array([bool(calls_of(record)) for record in records])
    right = np.asarray(is_right, dtype=float)
    metrics = {"eval/turns": _mean([len(record["turns"]) for record in records]), "eval/call_share": _mean(has_call)}
    for name, chosen in (("with_call", has_call), ("without_call", ~has_call)):
        if chosen.any():
            metrics[f"eval/accuracy_{name}"] = float(right[chosen].mean())
    return metrics


def calls_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of tools of an episode."""
    return [call for turn in record["turns"] for call in turn["calls"] if call["name"]]


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
