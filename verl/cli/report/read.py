"""A run, read from the files of its directory alone, also while it runs or after it was killed.

A resumed run is a chain of directories. Its metrics are those of the first one up to the checkpoint from which the
second one was resumed, then those of the second, and so on; steps that were trained again are kept apart.

checkpoints.json ──> lineage.jsonl ──> directories of the chain ──> RunSegment of each start ──> RunRecord

`findings` names metrics that left their usual range, in words, with the threshold.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.ownership import RunLock
from verl.checkpoint.resolve import RunCheckpoints
from verl.compose.schema import ROOTS, root_of_run
from verl.errors import CheckpointNotFound, ConfigError
from verl.tracking.jsonl import json_lines, json_object
from verl.trainer.state.lineage import ENVIRONMENT, FILE, events_of, read_events

MAX_CHAIN = 1000  # directories of a chain
MAX_NOTE = 4000  # characters of the description of an anomaly
RUNNING, KILLED = "running", "killed"

_log = logging.getLogger(__name__)
RECENT = 0.1  # share of the steps whose median is compared, and at least 5 steps


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to dotted paths; lists are leaves."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


@dataclass
class MetricColumn:
    """The values of one metric, a value per entry of `steps`; what is not a finite number is nan."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: float) -> None:
        self.steps.append(step)
        self.values.append(value if math.isfinite(value) else math.nan)


@dataclass
class RunSegment:
    """The lines of `metrics.jsonl` that one start of a training wrote.

    Attributes:
        start_step: steps done when it started.
        end_step: the last of its steps that no later segment trained again.
        time_s: seconds since this start by step, of training steps.
    """

    directory: Path
    start_step: float = 0
    end_step: float = math.inf
    columns: dict[str, MetricColumn] = field(default_factory=dict)
    time_s: MetricColumn = field(default_factory=MetricColumn)


@dataclass
class RunRecord:
    """A run with everything that its files tell.

    Attributes:
        name: project and experiment.
        status: see `run_status`.
        command: the command line that started it; empty for a run of a script.
        config: settings by path.
        differences: value and default by path or group, from `start.json`.
        code, identity: of the lineage: version and commit; settings and hashes of data and models.
        segments: in order of time, oldest first.
        lineage: for each directory of the chain, run id, directory, parent step and status.
        evals: evaluated rows by step; tokens: token rows by step; both from the files of the same name.
        anomalies: directory and description of each.
    """

    directory: Path
    name: str
    status: str
    command: str
    config: dict[str, Any]
    differences: dict[str, Any]
    summary: dict[str, Any]
    plan: dict[str, Any]
    code: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    segments: list[RunSegment] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    evals: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    anomalies: list[tuple[str, str]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The last step in the metrics; 0 if there is none."""
        return int(max((c.steps[-1] for s in self.segments for c in s.columns.values() if c.steps), default=0))

    def column(self, key: str) -> MetricColumn:
        """A metric along the chain, without steps that were trained again."""
        joined = MetricColumn()
        for segment in self.segments:
            column = segment.columns.get(key, MetricColumn())
            for step, value in zip(column.steps, column.values, strict=True):
                if step <= segment.end_step:
                    joined.add(step, value)
        return joined

    def keys(self) -> list[str]:
        """Names of all metrics, in the order of their first line."""
        return list(dict.fromkeys(key for segment in self.segments for key in segment.columns))

    def clock(self) -> MetricColumn:
        """Seconds of training along the chain, by step."""
        joined, before_s = MetricColumn(), 0.0
        for segment in self.segments:
            for step, seconds in zip(segment.time_s.steps, segment.time_s.values, strict=True):
                if step <= segment.end_step:
                    joined.add(step, before_s + seconds)
            before_s = joined.values[-1] if joined.values else 0.0
        return joined


def read_run(directory: str | Path) -> RunRecord:
    """Read a run.

    Raises:
        ConfigError: this is not the directory of a run.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Give the directory of a run.")
    if not (path / "metrics.jsonl").is_file() and not (path / "config.yaml").is_file():
        raise ConfigError(
            f"{path} has neither metrics.jsonl nor config.yaml: it is not the directory of a run. Runs with the "
            "tracker jsonl write metrics.jsonl."
        )
    config, summary, start = _config(path), json_object(path / "summary.json"), json_object(path / "start.json")
    chain = _chain(path)
    directories = list(dict.fromkeys(link["directory"] for link in chain)) or [path]
    run = RunRecord(
        path,
        str(start.get("name") or path.resolve().name),
        run_status(path),
        _command(path, config),
        config,
        start["differences"] if isinstance(start.get("differences"), dict) else {},
        summary,
        json_object(path / "plan.json"),
        lineage=chain,
        segments=_segments(directories, chain),
        anomalies=[*_anomalies(path)],
    )
    run.code = json_object(path / ENVIRONMENT).get("code") or {}  # of a run without checkpoints too
    if chain:
        run.code, run.identity = chain[-1]["code"], chain[-1]["identity"]
    for folder, rows in (("evals", run.evals), ("tokens", run.tokens)):
        for step, file in step_files(run, folder).items():
            rows[step] = [row for row in json_lines(file) if isinstance(row.get("kind", ""), str)]
    return run


def run_status(directory: Path, events: Sequence[Mapping[str, Any]] | None = None) -> str:
    """`running` while a process holds the lock of the directory; else as the run ended by its `last_start`, or by
    `summary.json`, which an earlier start may have written; `killed` if nothing says so."""
    if RunLock.held_here(directory) or RunLock.holder_of(directory):
        return RUNNING
    ended = [event["status"] for event in events or [] if event["event"] == "end"]
    if not ended:  # what was read before the lock was looked at may lack the end
        events = last_start(directory)
        ended = [event["status"] for event in events if event["event"] == "end"]
    if not events:
        ended = [status] if isinstance(status := json_object(directory / "summary.json").get("status"), str) else []
    return ended[-1] if ended else KILLED


def last_start(directory: Path) -> list[dict[str, Any]]:
    """The recorded events of the last start of a training in a directory; empty without a record."""
    return [] if (saved := saved_by(directory)) is None else events_of(saved, directory)


def saved_by(directory: Path) -> RunCheckpoints | None:
    """The place of a run's checkpoints; None if it saved none."""
    try:
        return RunCheckpoints.of(directory)
    except (CheckpointNotFound, OSError):
        return None


def step_files(run: RunRecord, folder: str) -> dict[int, Path]:
    """`FOLDER/step_N.jsonl` by N along the chain, sorted, without those of steps that were trained again."""
    files: dict[int, Path] = {}
    for segment in run.segments or [RunSegment(run.directory)]:
        for file in (segment.directory / folder).glob("step_*.jsonl"):
            number = file.stem.removeprefix("step_")
            if number.isascii() and number.isdecimal() and int(number) <= segment.end_step:
                files[int(number)] = file
    return dict(sorted(files.items()))


def as_number(value: Any) -> float:
    """A number of a record, which may be the text "nan" or "inf"; nan for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _segments(directories: list[Path], chain: list[dict[str, Any]]) -> list[RunSegment]:
    """The segments of all directories, each cut where a later one trained its steps again."""
    segments: list[RunSegment] = []
    resumed_at = {link["directory"]: link["step"] for link in reversed(chain) if link["step"] is not None}
    for directory in directories:
        parts = [*_file_segments(directory)]
        if parts and directory in resumed_at and segments:
            parts[0].start_step = resumed_at[directory]
        segments += parts
    later = math.inf
    for segment in reversed(segments):
        segment.end_step, later = later, min(later, segment.start_step)
    return segments


def _file_segments(directory: Path) -> Iterator[RunSegment]:
    """The segments of one file: a new one begins where the clock or the step goes back."""
    segment, last = None, (0.0, 0.0)
    for row in json_lines(directory / "metrics.jsonl"):
        step, time_s = as_number(row.pop("step", None)), as_number(row.pop("time_s", None))
        if not math.isfinite(step):
            continue
        is_training = any(not key.startswith("eval/") for key in row)
        if segment is None or time_s < last[1] or step < last[0]:
            if segment is not None:
                yield segment
            segment = RunSegment(directory, step - 1 if is_training else step)
        last = step, time_s
        if is_training:
            segment.time_s.add(step, time_s)
        for key, value in row.items():
            if isinstance(value, int | float | str):
                segment.columns.setdefault(key, MetricColumn()).add(step, as_number(value))
    if segment is not None:
        yield segment


def _chain(path: Path) -> list[dict[str, Any]]:
    """The directories from the first run to this one with their facts."""
    saved = saved_by(path)
    places = [] if saved is None else saved.places(path)
    directory = next((place for place in places if (place / FILE).is_file()), None)
    if directory is None or saved is None:
        return []
    chain: list[dict[str, Any]] = []
    events, run_id = read_events(directory, below=False), saved.run_id
    shift = os.path.relpath(path, directory)  # of a run beside its checkpoints, if both were moved
    while len(chain) < MAX_CHAIN and run_id not in [link["run_id"] for link in chain]:
        start = next((e for e in events if e["event"] == "run" and e["run_id"] == run_id), None)
        if start is None:
            break
        parent, end = start.get("parent"), [e for e in events if e["event"] == "end" and e["run_id"] == run_id]
        recorded = Path(str(start.get("run_dir", "")))
        beside = directory / Path(shift).parent / recorded.name
        link = {
            "run_id": run_id,
            "directory": path if not chain else recorded if recorded.is_dir() else beside,
            "time": start["time"],
            "step": parent["step"] if parent else None,
            "changed": parent["differences"] if parent else {},
            "code": start.get("code") or {},
            "identity": start.get("identity") or {},
            "status": end[-1]["status"] if end else None,
        }
        chain.append(link)
        if not parent:
            break
        run_id = parent["run_id"]
        if not any(e["run_id"] == run_id for e in events):  # saved elsewhere
            elsewhere = Path(parent["checkpoint"]).parent
            events = read_events(elsewhere, below=False) if elsewhere.is_dir() else []
    return chain[::-1]


def _config(path: Path) -> dict[str, Any]:
    """Settings by path: `trainer.total_steps`."""
    return {key: value for key, value in flat(json_object(path / "config.yaml")) if key}


def _command(path: Path, config: Mapping[str, Any]) -> str:
    """The command line, quoted for a shell."""
    file, command = path / "overrides.yaml", ROOTS[root_of_run(config.get("_target_"))].command
    return shlex.join(["verl", command, *map(str, json_object(file, list))]) if file.is_file() else ""


def _anomalies(path: Path) -> Iterator[tuple[str, str]]:
    for directory in sorted((path / "anomalies").glob("*")):
        try:
            with open(directory / "README.md", encoding="utf-8", errors="replace") as note:
                yield str(directory), note.read(MAX_NOTE)
        except OSError:
            continue


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
    Rule("rollout/log_prob_gap_nats", "gap of log-probs", 0.05, "engine and trainer differ: docs/rollout.md"),
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
