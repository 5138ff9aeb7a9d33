"""Metrics of a policy-gradient step, of its episodes and of an evaluation, and records of single responses.

All responses of an evaluation are recorded, and some of a training step, token by token.
"""

from __future__ import annotations

import hashlib
import math
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
EVALUATED = ("greedy", "sampled", "without_tools")  # kinds of responses of an evaluation
MAX_TOKENS = 4096  # of a row; the rest is cut
NUMBERS = ("rollout_log_probs", "old_log_probs", "entropies", "advantages")
DECIMALS = 6


def experience_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of the responses of a step, before the update; keys are explained in docs/metrics.md."""
    mask, scores = batch["response_mask"], torch.tensor(batch["score"].astype(float))
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


def clipped_ratio(batch: DataProto, max_new_tokens: int, stops: Sequence[int]) -> float:
    """Share of the responses that the limit has cut: as long as it, without a stop token at the end."""
    lengths = batch["response_mask"].sum(dim=1)
    last = batch["responses"].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    has_ended = torch.isin(last, torch.tensor(stops, dtype=last.dtype))
    return float(((lengths >= max_new_tokens) & ~has_ended).double().mean())


def evaluation_keys(k: int, has_episodes: bool) -> list[str]:
    """The keys that `evaluation_metrics` may have, for k responses per prompt."""
    keys = ["eval/accuracy", "eval/score", "eval/response_length_tokens"]
    keys += [f"eval/{name}@{k}" for name in ("mean", "best") if k]
    of_episodes = ("turns", "call_share", "accuracy_with_call", "accuracy_without_call", "accuracy_without_tools")
    return keys + [f"eval/{name}" for name in of_episodes if has_episodes]


def evaluation_metrics(records: Sequence[Mapping[str, Any]], has_tools: bool = True) -> dict[str, float]:
    """Metrics of an evaluation.

    Args:
        records: of every response, as `evaluated_rows` makes them: one greedy response per prompt, k samples side by
            side or none, and one per prompt without tools or none.
        has_tools: whether there are tools to call.
    """
    greedy, sampled, bare = ([row for row in records if row["kind"] == kind and _is_scored(row)] for kind in EVALUATED)
    answers = [row for row in records if row["kind"] == "greedy"]
    metrics = {"eval/accuracy": _mean_of(greedy, "success"), "eval/score": _mean_of(greedy, "score")}
    metrics["eval/response_length_tokens"] = _mean_of(answers, "tokens")
    if len(greedy) < len(answers):
        metrics["eval/unscored"] = float(len(answers) - len(greedy))
    metrics |= accuracy_by_calls(greedy, has_tools) | {"eval/accuracy_without_tools": _mean_of(bare, "success")}
    if sampled:
        k, best = 1 + max(row["sample_id"] for row in sampled), [max(right) for right in successes_by_prompt(sampled)]
        metrics |= {f"eval/mean@{k}": _mean_of(sampled, "success"), f"eval/best@{k}": sum(best) / len(best)}
    return {name: x for name, x in metrics.items() if not np.isnan(x)}


def successes_by_prompt(sampled: Sequence[Mapping[str, Any]]) -> list[list[bool]]:
    """Whether each response is right, by prompt."""
    by_prompt: dict[int, list[bool]] = {}
    for row in sampled:
        by_prompt.setdefault(row["prompt_id"], []).append(row["success"])
    return list(by_prompt.values())


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Probability that one of k responses is right, estimated without bias from n sampled ones of which c are right.

        pass@k = 1 - C(n - c, k) / C(n, k)

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    Degenerate: 1 where fewer than k of the n are wrong.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def interval_of_mean(values: Sequence[float], samples: int = 1) -> tuple[float, float, float]:
    """The mean of values in [0, 1], one for each prompt, and its 95% interval: Wilson's, for an effective number of
    draws.

        n_eff = p (1 - p) n / Var(values), between n prompts and n * samples responses

    Source: Wilson 1927, eq. 4; prompts as clusters of responses: Miller 2024, arXiv:2411.00640, section 2.2.

    Args:
        values: the share of a prompt's responses that are right, or a probability of it.
        samples: responses behind each value.
    """
    n, p, z = len(values), sum(values) / len(values), 1.959964
    variance = float(np.var(values, ddof=1)) if n > 1 else math.inf
    effective = p * (1 - p) * n / variance if variance > 0 else n * samples * (0 < p < 1)
    count = min(max(effective, n), n * samples)
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2)
    low, high = ((middle + sign * half) / (1 + z * z / count) for sign in (-1, 1))
    return p, max(0.0, low), min(1.0, high)


def evaluation_estimates(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Accuracy, mean@n and pass@k for k = 1, 2, 4, ... n, each with the ends of its 95% interval."""
    greedy, sampled, _ = ([row for row in records if row["kind"] == kind and _is_scored(row)] for kind in EVALUATED)
    values = {"eval/accuracy": ([float(row["success"]) for row in greedy], 1)}
    if sampled:
        right, n = successes_by_prompt(sampled), 1 + max(row["sample_id"] for row in sampled)
        values[f"eval/mean@{n}"] = [sum(x) / len(x) for x in right], n
        for k in sorted({n, *(2**i for i in range(n.bit_length()))}):
            values[f"eval/pass@{k}"] = [pass_at_k(sum(x), len(x), k) for x in right if len(x) >= k], n if k == 1 else 1
    return {key: interval_of_mean(x, samples) for key, (x, samples) in values.items() if x}


def sample_rows(batch: DataProto, count: int) -> list[dict[str, Any]]:
    """The first rows of a scored batch as a table: prompt, response, score, the columns of the data, and of a chat its
    last message as `last_turn`."""
    columns = batch.non_tensor_batch
    first = ["prompt_text", "response_text", "score"]
    names = [*first, *(name for name in columns if name not in (*first, "prompt_messages"))]  # the text says the same
    rows = [{name: columns[name][row] for name in names} for row in range(min(count, len(batch)))]
    for row, messages in zip(rows, columns.get("prompt_messages", ()), strict=False):
        if messages and isinstance(messages[-1].get("content"), str):
            row["last_turn"] = messages[-1]["content"]
    return rows


def mean_of(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one training step: those that were made, or all where none was.

    A metric that some of them lack, such as one of a user's loss, is the mean of the others.
    """
    metrics = [m for m in metrics if is_finite(m)] or metrics
    values = {name: [m[name] for m in metrics if name in m] for step_metrics in metrics for name in step_metrics}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


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


def accuracy_by_calls(records: Sequence[Mapping[str, Any]], has_tools: bool) -> dict[str, float]:
    """Accuracy of the episodes of an evaluation that made a call, and of those that made none, if there are tools."""
    if not records or "turns" not in records[0]:
        return {}
    metrics = {"eval/turns": _mean_of(records, "turns")}
    calling, others = [row for row in records if row["calls"]], [row for row in records if not row["calls"]]
    if has_tools or calling:
        metrics["eval/call_share"] = len(calling) / len(records)
        metrics["eval/accuracy_with_call"] = _mean_of(calling, "success")
        metrics["eval/accuracy_without_call"] = _mean_of(others, "success")
    return metrics


def calls_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of tools of an episode."""
    return [call for turn in record["turns"] for call in turn["calls"] if call["name"]]


def _is_scored(record: Mapping[str, Any]) -> bool:
    return not math.isnan(float(record["score"]))  # in a file a text


def _mean_of(records: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(torch.tensor([row[key] for row in records], dtype=torch.float64).mean())


def _mean_or_zero(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def evaluated_rows(
    evaluated: Mapping[str, DataProto | None], success: float, has_texts: bool = False
) -> list[dict[str, Any]]:
    """One record for each response of an evaluation.

    Args:
        evaluated: scored responses by kind: `greedy`, `drawn`, `without_tools`; None if there are none.
        success: a score that counts as right.
        has_texts: add prompt and response.
    """
    records = []
    for kind, batch in evaluated.items():
        if batch is None:
            continue
        scores = batch["score"].astype(float)
        table = {"kind": [kind] * len(batch), "prompt_id": batch["prompt_ids"].tolist()}
        images = batch["media_keys"].tolist() if "media_keys" in batch else [0] * len(batch)
        table["prompt_digest"] = [*map(_digest, batch["prompt_text"], images)]
        table |= {"sample_id": batch["sample_ids"].tolist(), "score": scores.tolist()}
        table |= {"tokens": batch["response_mask"].sum(dim=1).tolist(), "success": (scores >= success).tolist()}
        if (episodes := batch.non_tensor_batch.get("episode")) is not None:
            table |= {"turns": [len(x["turns"]) for x in episodes], "calls": [len(calls_of(x)) for x in episodes]}
        table |= {name: batch[f"{name}_text"].tolist() for name in ("prompt", "response") if has_texts}
        records += [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    return records


def _digest(prompt: str, images: int) -> str:
    """Identity of a prompt, by which `verl report` finds those that two runs share."""
    return hashlib.blake2b(f"{images} {prompt}".encode(), digest_size=6).hexdigest()


def token_rows(batch: DataProto, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The first rows of an experience [B S], token by token.

    A list has an entry for each token of the response, observations included; numbers are rounded to `DECIMALS`.

    Args:
        count: number of rows, at most.
        tokenizer: of the policy.
    Returns:
        `prompt_id`, `sample_id`, `score`, `prompt`, and the lists `ids`, `texts`, `mask` (1 on tokens that the policy
        chose), `versions` (of the policy that sampled them), and those of `NUMBERS` that the batch has.
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
