"""The jobs of a sweep side by side: on the terminal, in a CSV file and as a picture."""

from __future__ import annotations

import csv
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl.tracking.wandb import RUN_FILE

MIB = 2**20
WIDE = 240  # characters
Measure = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], float | None]
"""One column: from `summary.json` and the lines of `metrics.jsonl` to a number, or None if it was not measured."""


@dataclass
class JobOutcome:
    """One job of a sweep, as its directory tells.

    Attributes:
        name: of its directory.
        overrides: what was assigned to this job, by key.
        status: as in `summary.json`; `not run` where there is none.
        measured: column -> value; columns that could not be measured are missing.
        wandb: where its W&B run is: an address, or offline a directory below that of the sweep; empty for none.
    """

    name: str
    overrides: dict[str, str]
    status: str = "not run"
    measured: dict[str, float] = field(default_factory=dict)
    wandb: str = ""


def outcomes(directory: Path) -> list[JobOutcome]:
    """The jobs below a sweep's directory, in the order of their numbers."""
    jobs = [path for path in directory.iterdir() if path.is_dir() and path.name.isdigit()]
    return [outcome(job) for job in sorted(jobs, key=lambda path: int(path.name))]


def outcome(run_dir: Path) -> JobOutcome:
    """What one job came to."""
    job = JobOutcome(run_dir.name, _overrides(run_dir), wandb=_wandb(run_dir))
    summary = _json(run_dir / "summary.json")
    if summary is None:
        return job
    job.status = summary["status"]
    lines = [line for line in _steps(run_dir / "metrics.jsonl") if "timing/step_s" in line]
    for column, measure in COLUMNS.items():
        if (value := measure(summary, lines)) is not None:
            job.measured[column] = value
    return job


def table(jobs: Sequence[JobOutcome]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells: what differs between the jobs, their status, and what was measured."""
    keys = [key for key in dict.fromkeys(k for job in jobs for k in job.overrides) if _differs(jobs, key)]
    columns = [column for column in COLUMNS if any(column in job.measured for job in jobs)]
    rows = [
        [job.name, *(job.overrides.get(key, "") for key in keys), job.status, *(_cell(job, c) for c in columns)]
        for job in jobs
    ]
    return ["job", *keys, "status", *columns], rows


def write(directory: Path, jobs: Sequence[JobOutcome]) -> list[Path]:
    """Write `sweep.csv` and `sweep.png` into the sweep's directory; returns what was written."""
    head, rows = table(jobs)
    if any(job.wandb for job in jobs):
        head, rows = [*head, "W&B run"], [[*row, job.wandb] for row, job in zip(rows, jobs, strict=True)]
    with (directory / "sweep.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    written = [directory / "sweep.csv"]
    if any(job.measured for job in jobs):
        _draw(directory / "sweep.png", jobs, head[1 : head.index("status")])
        written.append(directory / "sweep.png")
    return written


def show(jobs: Sequence[JobOutcome], title: str) -> None:
    """Print the table; on a terminal the number of a job leads to its W&B run. What is no terminal is as wide as it."""
    import rich
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    head, rows = table(jobs)
    shown = Table(title=title)
    for index, column in enumerate(head):
        is_number = index > head.index("status")
        shown.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=not is_number)
    for job, (name, *cells) in zip(jobs, rows, strict=True):
        link = f"link {job.wandb}" if "://" in job.wandb else ""
        shown.add_row(Text(name, style=link), *cells)
    console = rich.get_console()
    (console if console.is_terminal else Console(width=WIDE)).print(shown)


def _mean(key: str) -> Measure:
    def measure(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
        values = [float(line[key]) for line in lines if key in line]
        return statistics.median(values) if values else None

    return measure


def _rate(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
    seconds = sum(float(line["timing/step_s"]) for line in lines)
    return sum(float(line.get("perf/tokens", 0)) for line in lines) / seconds if seconds else None


def _peak(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
    return max((float(line["perf/peak_memory_mib"]) for line in lines if "perf/peak_memory_mib" in line), default=None)


def _of_saves(name: str, scale: float = 1.0) -> Measure:
    def measure(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
        saves = summary.get("saves", [])
        return statistics.median(save[name] for save in saves) * scale if saves else None

    return measure


def _last_reward(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
    values = [float(line["reward/mean"]) for line in lines if "reward/mean" in line]
    return values[-1] if values else None


def _last_accuracy(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
    found = [metrics["eval/accuracy"] for metrics in summary["evaluations"].values() if "eval/accuracy" in metrics]
    return found[-1] if found else None


COLUMNS: dict[str, Measure] = {
    "step (s)": _mean("timing/step_s"),
    "tokens/s": _rate,
    "peak memory of a process (MiB)": _peak,
    "save stall (s)": _of_saves("stall_s"),
    "checkpoint (MiB)": _of_saves("bytes", 1 / MIB),
    "last reward": _last_reward,
    "accuracy": _last_accuracy,
}


def _cell(job: JobOutcome, column: str) -> str:
    value = job.measured.get(column)
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def _differs(jobs: Sequence[JobOutcome], key: str) -> bool:
    return len({job.overrides.get(key) for job in jobs}) > 1 or len(jobs) == 1


def _overrides(run_dir: Path) -> dict[str, str]:
    file = run_dir / "overrides.yaml"
    given = yaml.safe_load(file.read_text()) if file.exists() else None
    pairs = (text.lstrip("+~").partition("=") for text in given or [])
    return {key: value for key, _, value in pairs}


def _wandb(run_dir: Path) -> str:
    place = _json(run_dir / RUN_FILE)
    if place is None:
        return ""
    return place["url"] or os.path.relpath(place["directory"], run_dir.parent)


def _json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


def _steps(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _draw(path: Path, jobs: Sequence[JobOutcome], keys: Sequence[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [column for column in COLUMNS if any(column in job.measured for job in jobs)]
    names = ["\n".join(f"{key}={job.overrides.get(key, '')}" for key in keys) or job.name for job in jobs]
    figure, axes = pyplot.subplots(1, len(columns), figsize=(2.6 * len(columns), 0.5 * len(jobs) + 1.6), squeeze=False)
    for axis, column in zip(axes[0], columns, strict=True):
        axis.barh(range(len(jobs)), [job.measured.get(column, 0.0) for job in jobs], color="#2458a6")
        axis.set_title(column, fontsize=8)
        axis.set_yticks(range(len(jobs)), names if axis is axes[0][0] else [""] * len(jobs), fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
