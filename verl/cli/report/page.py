"""The HTML page of runs, and the JSON in it.

The page is one file: it runs its own script, `page.js`, and loads nothing. Texts of a run are JSON in it and are shown
as text, never as markup. Numbers of curves are base64 of Float32.

Evaluations are compared by intervals of 95 %: of the difference between two of the same prompts, and of a mean over
seeds.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import html
import itertools
import json
import math
import shlex
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verl.cli.console import duration
from verl.cli.report.read import KILLED, MetricColumn, RunRecord, as_number, diagnosis, read_run, step_files
from verl.tracking.base import HEADLINE
from verl.tracking.jsonl import lines_of
from verl.utils.external_input import ExternalInputError, parse_mapping, plain
from verl.utils.redact import redact_tree

RESAMPLES = 10_000
LEAST_SEEDS = 3  # two values say nothing about their spread
# 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom; later ones are below the last by less than 4 %
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
T = TypeVar("T")

PANELS: dict[str, list[str]] = {
    "reward": ["reward/mean"],
    "accuracy": ["*accuracy", "*/accuracy_*_call", "*/accuracy_without_tools", "*/mean@*", "*/best@*"],
    "episodes": ["*/call_share", "*/turns"],
    "KL (nats)": ["kl/*_nats", "actor/approx_kl*"],
    "response length (tokens)": ["*response_length_tokens"],
    "policy loss": ["actor/loss"],
    "value loss": ["critic/loss"],
    "loss (nats per token)": ["sft/loss", "eval/loss"],
    "entropy (nats)": ["rollout/entropy_nats", "actor/entropy"],
    "clip share": ["*/clip_fraction"],
    "gradient norm": ["*/grad_norm"],
    "gap of log-probs (nats)": ["rollout/log_prob_gap_nats", "rollout/off_policy_gap_nats", "sync/probe_gap_nats"],
    "effective share": ["*/effective_share"],
    "staleness (versions)": ["*staleness*"],
    "samples per second": ["perf/samples_per_s"],
}  # of the page, by title: metric keys with * as wildcard, each in the first that matches
MAX_VALUES = 400_000  # of the curves of a page
MAX_TEXT = 20_000  # characters of a prompt or response
MAX_TEXTS = 4_000_000  # characters of all samples
MAX_TOKENS = 50_000  # tokens of all rows in the view of tokens
MAX_PROMPTS = 5_000  # listed by pass rate
SEED = "trainer.seed"
# Settings that name a run or where it writes, in which runs of one group may differ
NAMES = (SEED, "trainer.experiment_name", "trainer.project_name", "checkpoint.save_dir", "resume")


def panel_of(key: str) -> str | None:
    """The title of the panel that shows a metric, or None."""
    return next((t for t, patterns in PANELS.items() if any(fnmatch.fnmatchcase(key, p) for p in patterns)), None)


@dataclass(frozen=True)
class Interval:
    """A mean with the ends of its 95 % interval, and the number of values that it is of."""

    mean: float
    low: float
    high: float
    count: int


def paired_bootstrap(first: Mapping[int, float], second: Mapping[int, float], seed: int = 0) -> Interval | None:
    """Interval of the mean of `second` minus `first` over the prompts that both have.

    Prompts are drawn with replacement `RESAMPLES` times; the interval is from the 2.5 % to the 97.5 % quantile of the
    means. Source: Efron and Tibshirani 1993, section 13.3. It covers the choice of prompts, not that of the run's seed.

    Args:
        first, second: value of each prompt, such as its pass rate.
    Returns:
        None if they share fewer than two prompts.
    """
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        return None
    values = np.array([second[prompt] - first[prompt] for prompt in shared])
    generator = np.random.default_rng(seed)
    means = [values[generator.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high), len(values))


def interval_over_seeds(values: Sequence[float]) -> Interval | None:
    """Interval of the mean by Student's t; None for fewer than three values."""
    if len(values) < LEAST_SEEDS:
        return None
    mean = statistics.fmean(values)
    reach = student_t(len(values)) * statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, mean - reach, mean + reach, len(values))


def student_t(count: int) -> float:
    """The 97.5 % quantile of Student's t for the mean of so many values."""
    return STUDENT_T[min(count - 1, len(STUDENT_T)) - 1]


def report(directories: Sequence[str | Path], status: str | None = None) -> str:
    """The page of a run, or of several to compare them.

    Args:
        status: of the first run, if its files do not tell it yet.
    Raises:
        ConfigError: one of them is not the directory of a run.
    """
    runs = [read_run(directory) for directory in directories]
    if status is not None:
        runs[0].status = status
    grids = _Grids()
    content: dict[str, Any] = {"runs": [_run(run, grids, MAX_VALUES // len(runs)) for run in runs], "panels": []}
    for key in dict.fromkeys(key for run in runs for key in run.keys()):  # noqa: SIM118 - not a mapping
        content["panels"].append((key, panel_of(key)))
    if len(runs) > 1:
        content["comparison"] = _comparison(runs)
    else:
        content |= _samples(runs[0]) | _tokens(runs[0]) | {"prompts": _prompts(runs[0])}
    content["grids"] = grids.encoded
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(dict.fromkeys(r.name for r in runs))}"
    content["written"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return render(content, title)


def render(content: Mapping[str, Any], title: str) -> str:
    """The HTML of a page.

    Args:
        content: JSON values; see `report`. Numbers that are not finite become texts.
    """
    style, script = (files("verl.cli.report").joinpath(f"page.{suffix}").read_text("utf-8") for suffix in ("css", "js"))
    data = json.dumps(plain(content), allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    heading = html.escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in title))
    # the rule of browsers that the page runs this script and loads nothing
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    rules = "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; base-uri 'none'".format(*digests)
    rules += "; form-action 'none'; img-src data:"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>\n'
        f"<body><header><h1>{heading}</h1></header><main><noscript>This page needs JavaScript.</noscript></main>\n"
        f'<script id="content" type="application/json">{data}</script>\n<script>{script}</script></body></html>\n'
    )


class _Grids:
    """Step numbers of the curves; curves with the same ones share them."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self._index: dict[bytes, int] = {}

    def add(self, steps: np.ndarray) -> int:
        data = steps.astype("<f4").tobytes()
        if data not in self._index:
            self._index[data] = len(self.encoded)
            self.encoded.append(_base64(data))
        return self._index[data]

    def curve(self, steps: array[float], values: array[float], most: int) -> dict[str, Any]:
        """A curve of at most about `most` points: of longer ones the least and the greatest of each stretch stay."""
        xs, ys = np.frombuffer(steps), np.frombuffer(values)
        if len(xs) > most:
            bounds = np.linspace(0, len(xs), most // 2 + 1).astype(int)
            rows = [
                row
                for low, high in itertools.pairwise(bounds)
                for row in sorted({low + end for end in _ends(ys[low:high])})
            ]
            xs, ys = xs[rows], ys[rows]
        return {"grid": self.add(xs), "values": _base64(ys.astype("<f4").tobytes())}


def _ends(values: np.ndarray) -> tuple[int, int]:
    """Positions of the least and of the greatest value that is a number."""
    is_gap = np.isnan(values)
    return int(np.where(is_gap, np.inf, values).argmin()), int(np.where(is_gap, -np.inf, values).argmax())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _run(run: RunRecord, grids: _Grids, values: int) -> dict[str, Any]:
    keys = run.keys()
    most = max(200, values // max(len(keys), 1))
    series: dict[str, Any] = {}
    for key in keys:
        column = run.column(key)
        series[key] = grids.curve(column.steps, column.values, most) | {"evaluated": key.startswith("eval/")}
        again = [_after(segment.columns[key], segment.end_step) for segment in run.segments if key in segment.columns]
        if again := [part for part in again if part.steps]:
            series[key]["again"] = [grids.curve(part.steps, part.values, most) for part in again]
    resumes = [int(segment.start_step) for segment in run.segments[1:]]
    ends = (run.clock(), run.segments[-1].time_s if run.segments else MetricColumn())
    until, of_last_start = (column.values[-1] if column.values else 0.0 for column in ends)
    facts = {
        "name": run.name,
        "directory": str(run.directory.absolute()),
        "status": run.status,
        "sentence": outcome(run),
        "error": run.summary.get("error"),
        "command": run.command,
        "differences": run.differences,
        "facts": _facts(run),
        "diagnosis": diagnosis(run),
        "lineage": [_link(link) for link in run.lineage],
        "anomalies": run.anomalies,
        "plan": run.plan,
    }
    return redact_tree(plain(facts)) | {
        "series": series,
        "resumes": resumes,
        "axes": _axes(run, grids, most),
        "before_s": until - of_last_start,
    }


def _after(column: MetricColumn, end_step: float) -> MetricColumn:
    """The part of a column whose steps were trained again."""
    first = next((index for index, step in enumerate(column.steps) if step > end_step), len(column.steps))
    return MetricColumn(column.steps[first:], column.values[first:])


def _axes(run: RunRecord, grids: _Grids, most: int) -> dict[str, Any]:
    """Seconds and samples until the end of each step, for the other two horizontal axes."""
    clock, samples = run.clock(), run.column("perf/samples")
    total = MetricColumn(samples.steps, array("d", np.nancumsum(samples.values)))
    return {
        name: grids.curve(column.steps, column.values, most)
        for name, column in (("seconds", clock), ("samples", total))
        if column.steps
    }


def outcome(run: RunRecord) -> str:
    """One sentence on how the run ended and what it reached."""
    total = run.config.get("trainer.total_steps")
    steps = f"{run.steps} of {total} steps" if isinstance(total, int) else f"{run.steps} steps"
    seconds = run.clock().values
    lasted = f" in {duration(seconds[-1])}" if len(seconds) and math.isfinite(seconds[-1]) else ""
    begin = {"running": "Running:", KILLED: "No summary, so killed or on another machine:"}.get(run.status)
    text = f"{begin or run.status.capitalize() + ' after'} {steps}{lasted}"
    for key in HEADLINE:
        values = [value for value in run.column(key).values if math.isfinite(value)]
        if len(values) == 1:
            text += f"; {key} is {values[0]:.4g}"
        elif values:
            verb = "stayed at" if values[-1] == values[0] else "rose from" if values[-1] > values[0] else "fell from"
            change = f"{values[0]:.4g}" if verb == "stayed at" else f"{values[0]:.4g} to {values[-1]:.4g}"
            best = min(values) if key.endswith("loss") else max(values)
            text += f"; {key} {verb} {change}" + (f" (best {best:.4g})" if best != values[-1] else "")
            break
    if (error := run.summary.get("error")) and run.status != "finished":
        text += f". {str(error).splitlines()[0][:300]}"
    return text.rstrip(".") + "."


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    code, facts = run.code, [("directory", str(run.directory.absolute()))]
    if code:
        changed = ", with changes that are not committed" if code.get("modified") else ""
        commit = f", commit {str(code['commit'])[:12]}{changed}" if code.get("commit") else ""
        facts.append(("code", f"verl {code.get('verl', '?')}{commit}"))
    for path, value in run.identity.items():
        if isinstance(value, dict) and len(value) == 1:
            facts.append((f"content of {path}", " ".join(f"{kind} {str(text)[:16]}" for kind, text in value.items())))
    data = run.summary.get("data")
    if isinstance(data, dict) and data:
        facts.append(("data", ", ".join(f"{name} {number}" for name, number in data.items())))
    settings = [key for key in (SEED, "trainer.device", "trainer.num_threads") if key in run.config]
    return facts + [(key, "auto" if run.config[key] is None else str(run.config[key])) for key in settings]


def _link(link: Mapping[str, Any]) -> dict[str, Any]:
    shown = ("run_id", "step", "status", "changed", "time")
    return {**{key: link[key] for key in shown}, "directory": str(link["directory"])}


def _evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` items, evenly spaced, the first and the last among them."""
    if count >= len(items):
        return list(items)
    return [items[round(index * (len(items) - 1) / max(count - 1, 1))] for index in range(count)]


def _samples(run: RunRecord) -> dict[str, Any]:
    """Samples of the evaluations: all, or those of evenly spaced steps if they are long."""
    paths = step_files(run, "samples")
    num_bytes = sum(path.stat().st_size for path in paths.values())
    chosen = _evenly([*paths], int(len(paths) * min(1.0, MAX_TEXTS / max(num_bytes, 1))) or 2)
    rows = [row for step in chosen for row in _sample_rows(paths[step], step)]
    for row in rows:
        for name in ("prompt", "response"):
            if len(row[name]) > MAX_TEXT:
                row[name] = f"{row[name][:MAX_TEXT]} ... {len(row[name]) - MAX_TEXT} more characters"
    left_out = sorted(set(paths) - set(chosen))
    return {"samples": rows, "samples_left_out": left_out} if rows else {}


def _sample_rows(file: Path, step: int) -> Iterator[dict[str, Any]]:
    """The rows of a sample table, without what cannot be read, such as the partial line that a killed run leaves."""
    for line in lines_of(file):
        try:
            row = parse_mapping(line)
            texts = {name: row.pop(f"{name}_text", "") for name in ("prompt", "response")}
            texts = {name: text if isinstance(text, str) else json.dumps(text) for name, text in texts.items()}
            score, source = row.pop("score", None), str(row.pop("table", "samples"))
            score = None if score is None else float(score)
        except (ExternalInputError, ValueError, TypeError, OverflowError):
            continue
        yield {"source": source, "step": step, **texts, "score": score, "others": row}


def _tokens(run: RunRecord) -> dict[str, Any]:
    """Rows for the view of tokens, of evenly spaced steps if they are many."""
    lists = ("rollout_log_probs", "old_log_probs", "entropies", "advantages", "mask", "versions", "ids")
    steps = [*run.tokens]
    count = sum(len(row["texts"]) for rows in run.tokens.values() for row in rows if isinstance(row.get("texts"), list))
    chosen = _evenly(steps, int(len(steps) * min(1.0, MAX_TOKENS / max(count, 1))) or 2)
    shown = []
    for step in chosen:
        for row in run.tokens[step]:
            texts = row.get("texts")
            if not isinstance(texts, list) or not texts:
                continue
            columns = {
                name: [_rounded(value) for value in row[name]]
                for name in lists
                if isinstance(row.get(name), list) and len(row[name]) == len(texts)
            }
            names = {name: row.get(name) for name in ("prompt_id", "sample_id", "score")}
            prompt = str(row.get("prompt", ""))[:MAX_TEXT]
            shown.append({"step": step, **names, "prompt": prompt, "texts": [*map(str, texts)], "columns": columns})
    return {"tokens": shown, "tokens_left_out": sorted(set(steps) - set(chosen))} if shown else {}


def _rounded(value: Any) -> float | int | None:
    number = as_number(value)
    if not math.isfinite(number):
        return None
    return int(number) if number == int(number) else float(f"{number:.5g}")


def pass_rates(rows: Sequence[Mapping[str, Any]], kind: str | None = None) -> dict[int, float]:
    """Share of successful responses of each prompt.

    Args:
        rows: of an evaluation.
        kind: `greedy` or `drawn`; None for drawn ones if there are any, else greedy ones.
    """
    if kind is None:
        kind = "sampled" if any(row.get("kind") == "sampled" for row in rows) else "greedy"
    responses: dict[int, list[bool]] = {}
    for row in rows:
        prompt = row.get("prompt_id")
        if row.get("kind") == kind and isinstance(prompt, int) and str(row.get("score")) != "nan":  # has a reward
            responses.setdefault(prompt, []).append(bool(row.get("success")))
    return {prompt: sum(passed) / len(passed) for prompt, passed in responses.items()}


def _prompts(run: RunRecord) -> dict[str, Any] | None:
    """Pass rates of the prompts at the first and the last evaluation, and the best in between."""
    steps = [step for step, rows in run.evals.items() if rows]
    if len(steps) < 2:
        return None
    kinds = [{row.get("kind") for row in run.evals[step]} for step in (steps[0], steps[-1])]
    kind = "sampled" if all("sampled" in names for names in kinds) else "greedy"
    rates = {step: pass_rates(run.evals[step], kind) for step in steps}
    first, last = rates[steps[0]], rates[steps[-1]]
    shared = sorted(first.keys() & last.keys())
    best = {prompt: max(rate.get(prompt, 0.0) for rate in rates.values()) for prompt in shared}
    rows = [(prompt, first[prompt], last[prompt], best[prompt]) for prompt in shared]
    change = paired_bootstrap(first, last)
    return {
        "first": steps[0],
        "last": steps[-1],
        "kind": kind,
        "learned": sum(old < new for _, old, new, _ in rows),
        "forgotten": sum(old > new for _, old, new, _ in rows),
        "never": sum(most == 0 for *_, most in rows),
        "count": len(rows),
        "change": _interval(change),
        "rows": rows[:MAX_PROMPTS],
    }


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.mean, interval.low, interval.high, interval.count]


def _comparison(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Settings that differ, groups of runs that differ in their seed alone, and what the evaluations support."""
    paths = dict.fromkeys(path for run in runs for path in run.config)
    shown = [[run.config.get(path, "") for run in runs] for path in paths]
    settings = {path: values for path, values in zip(paths, shown, strict=True) if any(v != values[0] for v in values)}
    members: dict[str, list[int]] = {}
    for index in range(len(runs)):
        own = {path: values[index] for path, values in settings.items() if path not in NAMES}
        members.setdefault(json.dumps(plain(own), sort_keys=True), []).append(index)
    names = _overrides_that_differ([runs[indices[0]] for indices in members.values()])
    groups = []
    for key, indices, name in zip(members, members.values(), names, strict=True):
        name = name or ", ".join(f"{path}={value}" for path, value in [*json.loads(key).items()][:4])
        name = name or runs[indices[0]].name
        groups.append({"name": name, "runs": indices, "t": student_t(len(indices)) if len(indices) > 2 else None})
    return redact_tree({"settings": settings, "groups": groups}) | {"statistics": _statistics(runs, groups)}


def _overrides_that_differ(runs: Sequence[RunRecord]) -> list[str]:
    """The overrides of each run that not all have; empty texts if they do not tell the runs apart."""
    overrides = [[text.lstrip("+") for text in shlex.split(run.command)[2:]] for run in runs]
    shared = set(overrides[0]).intersection(*overrides)
    texts = [", ".join(o for o in each if o not in shared and o.partition("=")[0] not in NAMES) for each in overrides]
    return texts if all(texts) and len(set(texts)) == len(texts) else [""] * len(texts)


def _statistics(runs: Sequence[RunRecord], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Last evaluations: of each group over its seeds, and of each group less the first, over seeds or else prompts."""
    lines = []
    key, step = _last_shared(runs)
    results: list[dict[Any, float]] = []  # of each group, by seed
    for group in groups if key else ():
        columns = [runs[index].column(key) for index in group["runs"]]
        values = [column.values[column.steps.index(step)] for column in columns]
        results.append(dict(zip((str(runs[index].config.get(SEED)) for index in group["runs"]), values, strict=True)))
        interval = interval_over_seeds(values)
        why = "Student's t over {} seeds" if interval else "none: {} seeds, at least 3 are needed"
        mean = sum(values) / len(values)
        lines.append(_statistic(f"{key} at step {step:g}", group["name"], mean, interval, why.format(len(values))))
    reference = runs[groups[0]["runs"][0]]
    for index, group in enumerate(groups[1:], 1):
        name, what = f"{group['name']} less {groups[0]['name']}", f"{key} at step {step:g}"
        paired = results and results[0].keys() == results[index].keys()
        differences = [results[index][seed] - value for seed, value in results[0].items()] if paired else []
        if (interval := interval_over_seeds(differences)) is not None:
            why = f"Student's t over the differences of {len(differences)} seeds"
        else:
            what = "pass rate"
            interval, why = _paired(reference, runs[group["runs"][0]])
        lines.append(_statistic(what, name, interval.mean if interval else None, interval, why))
    return lines


def _statistic(what: str, of: str, mean: float | None, interval: Interval | None, why: str) -> dict[str, Any]:
    return {"what": what, "of": of, "mean": mean, "interval": _interval(interval), "why": why}


def _paired(first: RunRecord, second: RunRecord) -> tuple[Interval | None, str]:
    steps = [step for step in first.evals if step in second.evals]
    if not steps:
        return None, "none: the runs have no evals/ of the same step"
    step = steps[-1]
    one, other = (dict(_digests(run.evals[step])) for run in (first, second))
    if any(one[number] != other[number] for number in one.keys() & other.keys()):
        return None, "none: the runs evaluate other prompts"
    interval = paired_bootstrap(pass_rates(first.evals[step], "greedy"), pass_rates(second.evals[step], "greedy"))
    if interval is None:
        return None, "none: the evaluations share fewer than two prompts"
    return interval, f"bootstrap over {interval.count} prompts of step {step}, one run of each: not over seeds"


def _digests(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
    """The digest of each evaluated prompt, by its number."""
    for row in rows:
        if isinstance(number := row.get("prompt_id"), int):
            yield number, row.get("prompt_digest")


def _last_shared(runs: Sequence[RunRecord]) -> tuple[str, float]:
    """The main metric of the runs, and the last step at which all have it; an empty name if there is none."""
    for key in HEADLINE:
        columns = [run.column(key) for run in runs]
        shared = set.intersection(*({s for s, v in zip(c.steps, c.values, strict=True) if v == v} for c in columns))
        if shared:
            return key, max(shared)
    return "", 0
