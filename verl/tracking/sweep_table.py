"""The jobs of a sweep compared: a table on the terminal, and `sweep.csv`; their curves: `verl report DIR/[0-9]*`."""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.tracking.console import print_line, print_table
from verl.tracking.jsonl import json_lines, json_object
from verl.tracking.wandb import RUN_FILE

MIB = 2**20
# Computes a column from `summary.json` and the lines of `metrics.jsonl`; None if it was not measured
Measure = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], float | None]


@dataclass
class JobOutcome:
    """The result of a job of a sweep, read from its directory.

    Attributes:
        name: name of its directory.
        overrides: overrides of this job, by key.
        status: as in `summary.json`; `not run` without that file.
        measured: values by column; columns that were not measured are missing.
        wandb: URL of its W&B run, or the directory of an offline run relative to that of the sweep; empty for none.
    """

    name: str
    overrides: dict[str, str]
    status: str = "not run"
    measured: dict[str, float] = field(default_factory=dict)
    wandb: str = ""


def outcomes(directory: Path) -> list[JobOutcome]:
    """The jobs below a sweep's directory, by job number."""
    jobs = [path for path in directory.iterdir() if path.is_dir() and path.name.isdigit()]
    return [_outcome(job) for job in sorted(jobs, key=lambda path: int(path.name))]


def _outcome(run_dir: Path) -> JobOutcome:
    pairs = (str(text).lstrip("+~").partition("=") for text in json_object(run_dir / "overrides.yaml", list))
    run = json_object(run_dir / RUN_FILE)
    place = run["url"] or os.path.relpath(run["directory"], run_dir.parent) if run else ""
    job = JobOutcome(run_dir.name, {key: value for key, _, value in pairs}, wandb=place)
    if summary := json_object(run_dir / "summary.json"):
        lines = [line for line in json_lines(run_dir / "metrics.jsonl") if "timing/step_s" in line]
        found = {column: measure(summary, lines) for column, measure in COLUMNS.items()}
        job.status, job.measured = summary["status"], {name: x for name, x in found.items() if x is not None}
    return job


def table(jobs: Sequence[JobOutcome]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells: overrides that differ between jobs, status, and measurements."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    keys = [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1 or len(jobs) == 1]
    columns = [column for column in COLUMNS if any(column in job.measured for job in jobs)]
    rows = [
        [job.name, *(job.overrides.get(key, "") for key in keys), job.status, *(_cell(job, c) for c in columns)]
        for job in jobs
    ]
    return ["job", *keys, "status", *columns], rows


def write(directory: Path, jobs: Sequence[JobOutcome]) -> Path:
    """Write `sweep.csv` to the sweep's directory."""
    head, rows = table(jobs)
    if any(job.wandb for job in jobs):
        head, rows = [*head, "W&B run"], [[*row, job.wandb] for row, job in zip(rows, jobs, strict=True)]
    with open(directory / "sweep.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return directory / "sweep.csv"


def show(jobs: Sequence[JobOutcome], title: str) -> None:
    """Print the table without the columns that only `sweep.csv` has."""
    import rich

    head, rows = table(jobs)
    shown = [place for place, column in enumerate(head) if column not in ONLY_WRITTEN]
    print_line(rich.get_console(), title, "bold")
    print_table([head[i] for i in shown], [[row[i] for i in shown] for row in rows], right=list(COLUMNS))


def _values(lines: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [float(line[key]) for line in lines if key in line]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _rate(_: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
    seconds = sum(_values(lines, "timing/step_s"))
    return sum(_values(lines, "perf/tokens")) / seconds if seconds else None


COLUMNS: dict[str, Measure] = {
    "step (s)": lambda _, lines: _median(_values(lines, "timing/step_s")),
    "tokens/s": _rate,
    "peak memory of a process (MiB)": lambda _, lines: max(_values(lines, "perf/peak_memory_mib"), default=None),
    "save stall (s)": lambda summary, _: _median(_values(summary.get("saves", ()), "stall_s")),
    "checkpoint (MiB)": lambda summary, _: _median([x / MIB for x in _values(summary.get("saves", ()), "bytes")]),
    "last reward": lambda _, lines: _last(_values(lines, "reward/mean")),
    "accuracy": lambda summary, _: _last(_values(summary["evaluations"].values(), "eval/accuracy")),
}


ONLY_WRITTEN = ("tokens/s", "peak memory of a process (MiB)", "save stall (s)", "checkpoint (MiB)")


def _cell(job: JobOutcome, column: str) -> str:
    value = job.measured.get(column)
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
