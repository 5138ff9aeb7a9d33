"""Metrics that left their usual range, in words, with the threshold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from verl.cli.report.read import RunRecord, as_number

RECENT = 0.1  # share of the steps whose median is compared, and at least 5 steps


@dataclass(frozen=True)
class Rule:
    """A limit of a metric, beyond which it is suspicious.

    Attributes:
        limit: of the median of the last steps; below it for `is_lower`.
        of: a setting: the limit is a share of it; or `median`: the largest value of the run in medians is compared.
        advice: what to do beyond it.
    """

    key: str
    title: str
    limit: float
    advice: str
    is_lower: bool = False
    of: str | None = None


SPIKES = "look at the batches of these steps; lower optimizer.max_grad_norm"
RULES = (
    Rule("kl/reference_nats", "KL to the reference", 1.0, "raise the KL coefficient, or lower the learning rate"),
    Rule("actor/approx_kl", "KL of one update", 0.1, "lower the learning rate"),
    Rule("rollout/entropy_nats", "entropy", 0.01, "no more exploration: algorithm.entropy_coef", is_lower=True),
    Rule("actor/clip_fraction", "clipped tokens", 0.3, "steps are too large: lower the learning rate"),
    Rule("actor/grad_norm", "largest gradient norm of the actor", 10.0, SPIKES, of="median"),
    Rule("critic/grad_norm", "largest gradient norm of the critic", 10.0, SPIKES, of="median"),
    Rule("sft/grad_norm", "largest gradient norm", 10.0, SPIKES, of="median"),
    Rule("rollout/response_length_tokens", "response length", 0.9, "truncated", of="rollout.max_new_tokens"),
    Rule("reward/std", "spread of rewards", 1e-6, "all responses score alike: read the samples", is_lower=True),
    Rule("reward/failed", "failed rewards", 0.0, "the reward function fails: see run.log"),
    Rule("rollout/log_prob_gap_nats", "gap of log-probs", 0.05, "engine and trainer differ: docs/weight_proof.md"),
    Rule("importance/effective_share", "effective share", 0.5, "samples are too old", is_lower=True),
    Rule("replay/effective_share", "effective share of old rows", 0.5, "old rows are too old", is_lower=True),
    Rule("replay/staleness_max", "staleness", 0.99, "as old as allowed", of="algorithm.replay_max_staleness"),
)


def diagnosis(run: RunRecord) -> list[dict[str, object]]:
    """A finding for each rule whose metric the run has, those beyond their limit first."""
    findings = [finding for rule in RULES if (finding := _finding(run, rule)) is not None]
    return sorted(findings, key=lambda finding: not finding["exceeded"])


def _finding(run: RunRecord, rule: Rule) -> dict[str, object] | None:
    """Title, metric, value, threshold in words, whether it is exceeded, and advice; None without values."""
    values = [value for value in run.column(rule.key).values if math.isfinite(value)]
    if not values:
        return None
    value, limit = statistics.median(values[-max(5, int(len(values) * RECENT)) :]), rule.limit
    threshold = f"{'below' if rule.is_lower else 'above'} {limit:g}"
    if rule.of == "median":
        value, threshold = _in_medians(values), f"{threshold} medians of the run"
    elif rule.of is not None:
        setting = as_number(run.config.get(rule.of))
        if not setting > 0:
            return None
        limit *= setting
        threshold = f"above {limit:g} of {rule.of}={setting:g}"
    exceeded = value < limit if rule.is_lower else value > limit
    finding = {"title": rule.title, "key": rule.key, "value": value, "threshold": threshold}
    return {**finding, "exceeded": exceeded, "advice": rule.advice}


def _in_medians(values: Sequence[float]) -> float:
    return max(values) / max(statistics.median(values), 1e-12)
