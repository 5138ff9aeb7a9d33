"""Console output of a run: a progress bar, one line per step, a line per stage, a few samples."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.component import BuildContext
from verl.tracking.base import Tracker, TrackerDescription, metrics_line, stage_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console as RichConsole
    from rich.progress import Progress

_RECENT_STEPS = 20  # the remaining time is estimated from this many


@dataclass(frozen=True, kw_only=True)
class Console(TrackerDescription):
    """Lines on standard output; with a progress bar below them where that is a terminal.

    Args:
        stage_lines: print `[gen] 1.24s  384 responses, 1536 tokens` for every stage of every step.
        progress_bar: draw the bar on terminals.
        columns: metrics in the line of a step; those not logged are left out, and if none is, the first four are shown.
        sample_rows: rows shown of each sample table.
    """

    stage_lines: bool = True
    progress_bar: bool = True
    columns: tuple[str, ...] = (
        "reward/mean",
        "kl/reference_nats",
        "rollout/entropy_nats",
        "rollout/response_length_tokens",
        "sft/loss",
        "timing/step_s",
    )
    sample_rows: int = 3

    def faults(self) -> Iterator[str]:
        if self.sample_rows < 0:
            yield f"sample_rows is {self.sample_rows}: must be 0 or more."

    def build(self, context: BuildContext) -> ConsoleTracker:
        return ConsoleTracker(self)


class ConsoleTracker(Tracker):
    """Prints through one rich console, by default the one that log lines go to, so that neither tears the bar.

    Args:
        settings: what to show.
        console: where; None is the process's own.
    """

    def __init__(self, settings: Console, console: RichConsole | None = None):
        import rich

        self._settings = settings
        self._console = console or rich.get_console()
        self._progress: Progress | None = None
        self._total: int | None = None
        self._durations_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._total, self._last = total_steps, time.monotonic()
        steps = "" if total_steps is None else f", {total_steps} steps"
        self._print(f"run {run_name}{steps}, results in {run_dir}", "bold")
        if self._settings.progress_bar and self._console.is_terminal:
            self._progress = _bar(self._console)
            self._task = self._progress.add_task("training", total=total_steps, left="")
            self._progress.start()

    def stage(self, name: str, seconds: float, note: str) -> None:
        if self._settings.stage_lines:
            self._print(stage_line(name, seconds, note), "dim")

    def log(self, metrics: dict[str, float], step: int) -> None:
        now = time.monotonic()
        self._durations_s.append(now - self._last)
        self._last = now
        left = self._left(step)
        shown = {key: metrics[key] for key in self._settings.columns if key in metrics}
        shown = shown or dict(list(metrics.items())[:4])
        count = f"step {step}" if self._total is None else f"step {step}/{self._total}"
        line = f"{count}  {metrics_line(shown)}"
        self._print(line if self._progress or not left else f"{line}  {left} left")
        if self._progress:
            self._progress.update(self._task, completed=step, left=f"{left} left" if left else "")

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        self._print(f"evaluation after step {step}  {metrics_line(metrics)}", "green")

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        for row in rows[: self._settings.sample_rows]:
            self._print(f"{name} sample  " + "  ".join(f"{key}={_shown(value)}" for key, value in row.items()), "cyan")

    def message(self, text: str) -> None:
        self._print(text)

    def close(self, status: str) -> None:
        if self._progress:
            progress, self._progress = self._progress, None
            progress.stop()
        self._print(f"run {status}", "bold")

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        try:
            # soft_wrap: a pipe or file has no width, and a terminal wraps by itself.
            self._console.print(Text(_visible(text), style=style), soft_wrap=True)
        except SystemExit as error:  # what rich makes of a closed pipe; a reader who left is no reason to stop
            raise BrokenPipeError("nobody reads standard output any more") from error

    def _left(self, step: int) -> str:
        """Remaining time as `h:mm:ss`; empty where it cannot be told or nothing remains."""
        if self._total is None or step >= self._total or not self._durations_s:
            return ""
        seconds = round(sum(self._durations_s) / len(self._durations_s) * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _bar(console: RichConsole) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    # Few refreshes: the bar shares its cores with training.
    return Progress(*columns, console=console, transient=True, refresh_per_second=2)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _visible(text: str) -> str:
    """Control characters, which a model may well produce, as escapes; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
