"""Metrics of a policy-gradient step, of its episodes and of an evaluation, and records of single responses.

All responses of an evaluation are recorded, and some of a training step, token by token.
"""

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
MAX_TOKENS = 4096  # of a row; the rest is cut
NUMBERS = ("rollout_log_probs", "old_log_probs", "entropies", "advantages")
DECIMALS = 6


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
    values = {name: batch[name].astype(float) for name in parts}
    metrics |= {name: float(x[~np.isnan(x)].mean()) for name, x in values.items() if not np.isnan(x).all()}
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
    is_rated = ~_scores(greedy).isnan()
    metrics = {"eval/response_length_tokens": float(greedy["response_mask"].sum(dim=1).double().mean())}
    if not is_rated.all():
        metrics["eval/unrated"] = float((~is_rated).sum())
        greedy = greedy[is_rated]
    scores = _scores(greedy)
    metrics |= {"eval/accuracy": float((scores >= success).double().mean()), "eval/score": float(scores.mean())}
    metrics |= accuracy_by_calls(greedy, (scores >= success).tolist(), has_tools)
    if without_tools is not None:
        bare = _scores(without_tools)
        metrics["eval/accuracy_without_tools"] = float((bare[~bare.isnan()] >= success).double().mean())
    if drawn is not None:
        of_prompts = _scores(drawn).view(-1, k)
        right = of_prompts[~of_prompts.isnan()] >= success
        best = (of_prompts >= success)[~of_prompts.isnan().all(dim=1)].any(dim=1)
        metrics |= {f"eval/mean@{k}": float(right.double().mean()), f"eval/best@{k}": float(best.double().mean())}
    return {name: x for name, x in metrics.items() if not np.isnan(x)}


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


def evaluated_rows(evaluated: Mapping[str, DataProto | None], success: float) -> list[dict[str, Any]]:
    """One record for each response of an evaluation.

    Args:
        evaluated: scored responses by kind: `greedy`, `drawn`, `without_tools`; None if there are none.
        success: a score that counts as right.
    """
    records = []
    for kind, batch in evaluated.items():
        if batch is None:
            continue
        batch = batch[~_scores(batch).isnan()]
        scores, tokens = batch["score"].astype(float).tolist(), batch["response_mask"].sum(dim=1).tolist()
        rows = zip(batch["prompt_ids"].tolist(), batch["sample_ids"].tolist(), scores, tokens, strict=True)
        names = ("kind", "prompt_id", "sample_id", "score", "tokens")
        records += [{**dict(zip(names, (kind, *row), strict=True)), "success": row[2] >= success} for row in rows]
    return records


def token_rows(batch: DataProto, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The first rows of an experience [B S], token by token.

    A list has an entry for each token of the response, observations included; numbers are rounded to `DECIMALS`.

    Args:
        count: number of rows, at most.
        tokenizer: of the policy.
    Returns:
        `prompt_id`, `sample_id`, `score`, `prompt`, and the lists `ids`, `texts`, `mask` (1 on tokens that the policy
        chose), `versions` (of the policy that drew them), and those of `NUMBERS` that the batch has.
    """
    batch = batch[:count]
    width = batch["responses"].shape[1]
    lengths = batch["attention_mask"][:, batch["attention_mask"].shape[1] - width :].sum(dim=1).clamp(max=MAX_TOKENS)
    lists = {"ids": batch["responses"], "mask": batch["response_mask"].int()}
    lists |= {name: batch[name].double().round(decimals=DECIMALS) for name in NUMBERS if name in batch}
    lists["versions"] = batch["policy_version"][:, None].expand(-1, width)
    if "token_versions" in batch:
        lists["versions"] = batch["token_versions"]
    rows = []
    for row, length in enumerate(lengths.tolist()):
        of_tokens = {name: values[row, :length].tolist() for name, values in lists.items()}
        rows.append(
            {
                "prompt_id": int(batch["prompt_ids"][row]),
                "sample_id": int(batch["sample_ids"][row]),
                "score": float(batch["score"][row]),
                "prompt": batch["prompt_text"][row],
                **of_tokens,
            }
        )
    texts = token_texts({token for row in rows for token in row["ids"]}, tokenizer)
    return [{**row, "texts": [texts[token] for token in row["ids"]]} for row in rows]


def token_texts(ids: set[int], tokenizer: Any) -> dict[int, str]:
    """The text that each token adds after another one; half a character is the replacement character.

    SentencePiece drops the space before the first token of a text, so each token is decoded twice in a row.
    """
    ordered = sorted(ids)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    once = tokenizer.batch_decode([[token] for token in ordered], **options)
    twice = tokenizer.batch_decode([[token, token] for token in ordered], **options)
    return {token: both[len(first) :] for token, first, both in zip(ordered, once, twice, strict=True)}
