"""`verl watch`: a run as it goes: new lines of `metrics.jsonl`, as the console of the run shows them.

`verl report`: one HTML page of a run, or of several to compare them.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from verl.cli.console import echo, size
from verl.cli.report.read import RUNNING, RunRecord, as_number, read_run, run_status
from verl.tracking.console import PAGE, Console, ConsoleTracker
from verl.utils.external_input import ExternalInputError, parse_mapping

INTERVAL_S = 1.0  # between two looks at the files
FIRST_LINES = 10  # shown of what was there before
LARGEST_METRICS = 2**30  # bytes that are read at once of a file, which may be sparse


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
) -> None:
    """Follow a run: its lines as they are written, until it ends. `verl report` has it as a page at any time."""
    with contextlib.suppress(KeyboardInterrupt):
        _follow(read_run(run))


def _follow(record: RunRecord) -> None:
    from verl.cli.report.page import outcome

    run_dir, total = record.directory, record.config.get("trainer.total_steps")
    file, clock = run_dir / "metrics.jsonl", _RunClock()
    lines, offset = _new_lines(file, 0)
    for row in lines[:-FIRST_LINES]:
        clock.set(row)
    tracker = ConsoleTracker(Console(), clock=clock.read)
    tracker.start(record.name, {}, run_dir, total if isinstance(total, int) and total < 2**53 else None)
    is_running, lines = True, lines[-FIRST_LINES:]
    try:
        while is_running or lines:
            for row in lines:
                clock.set(row)
                _show(tracker, row)
            is_running = run_status(run_dir) == RUNNING  # before the lines: those of the end are read too
            time.sleep(INTERVAL_S if is_running else 0)
            lines, offset = _new_lines(file, offset)
    finally:
        tracker.close(run_status(run_dir))
    echo(outcome(read_run(run_dir)))
    if (run_dir / PAGE).is_file():
        echo(f"page {run_dir / PAGE}")


class _RunClock:
    """Seconds of a run by the `time_s` of its lines, so that its intervals are those of the run."""

    def __init__(self) -> None:
        self._before_s = self._last_s = 0.0

    def set(self, row: dict[str, Any]) -> None:
        time_s = as_number(row.get("time_s"))
        if time_s < self._last_s:  # the run was started again
            self._before_s += self._last_s
        self._last_s = time_s if 0 <= time_s < math.inf else self._last_s

    def read(self) -> float:
        return self._before_s + self._last_s


def _show(tracker: ConsoleTracker, row: dict[str, Any]) -> None:
    step = row.get("step")
    metrics = {key: as_number(value) for key, value in row.items() if key not in ("step", "time_s")}
    if not isinstance(step, int):
        return
    if all(key.startswith("eval/") for key in metrics):
        tracker.evaluation(metrics, step)
    else:
        tracker.log(metrics, step)


def _new_lines(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from an offset on, and the offset behind them."""
    try:
        with open(file, "rb") as lines:
            lines.seek(offset)
            data = lines.read(LARGEST_METRICS)
    except OSError:
        return [], offset
    whole, rows = data[: data.rfind(b"\n") + 1], []
    for line in whole.split(b"\n"):
        with contextlib.suppress(ExternalInputError):
            rows.append(parse_mapping(line))
    return rows, offset + len(whole)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several are compared.")],
    html: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page that shows a run, or compares several. It needs no network and no other file.

    A run may be running, or have been killed. Runs that differ in their seed alone are drawn as one band.
    """
    from verl.cli.report.page import report as page_of

    text = page_of(runs)
    html.write_text(text, "utf-8")
    echo(f"{html}: {size(len(text.encode()))}")
