"""Console output of a run: a line per step that fits the width, and the result at the end.

step 12/300  reward 0.812  kl 0.0128  entropy 4.48  length 7.67  0.90s  eta 4:22
  gen 0.09s  old 0.09s  ref 0.10s  update_critic 0.24s  update_actor 0.24s
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt

from verl.component import BuildContext, component
from verl.errors import end_cut
from verl.tracking.base import HEADLINE, Tracker, TrackerDescription, short
from verl.utils.external_input import printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

_RECENT_STEPS = 20  # the remaining time is estimated from this many
_DIGITS = 3
_CUT = "..."
MIN_CUT = 4  # characters of a truncated cell
WORTH_A_COLUMN = {"rollout/clipped_ratio": 0.1, "reward/unscored": 0.0}  # above these the line of a step has them
_LABELS = {  # shorter than the keys, so that the line of a step fits 80 columns
    "reward/mean": "reward",
    "kl/reference_nats": "kl",
    "distill/divergence_nats": "teacher",
    "rollout/entropy_nats": "entropy",
    "rollout/response_length_tokens": "length",
    "rollout/clipped_ratio": "clipped",
    "reward/unscored": "unscored",
    "sft/loss": "loss",
    "preference/loss": "loss",
    "rewards/accuracies": "accuracy",
    "eval/response_length_tokens": "length",
}
_STEP_S = "timing/step_s"
PAGE = "report.html"  # of a run, where a tracker writes it
_FROM_BOTH_ENDS = ("prompt", "prompt_text")  # truncated in the middle: prompts often begin alike


@component
class Console(TrackerDescription):
    """Prints to standard output.

    Args:
        stage_lines: print the times of a step's stages below it.
        every_s: seconds between lines of steps; the first and the last step of a run and those that evaluate always
            have theirs.
        columns: metrics in the line of a step, most important first; those that do not fit the width or are not logged
            are left out. If none is logged, the first four metrics are shown.
        sample_rows: rows shown of each sample table.
    """

    shows_others: ClassVar[bool] = True

    stage_lines: bool = False
    every_s: NonNegativeFloat = 1.0
    columns: tuple[str, ...] = (
        "reward/mean",
        "kl/reference_nats",
        "distill/divergence_nats",
        "rollout/entropy_nats",
        "rollout/response_length_tokens",
        "sft/loss",
        "preference/loss",
        "rewards/accuracies",
        _STEP_S,
    )
    sample_rows: NonNegativeInt = 3

    def build(self, context: BuildContext) -> ConsoleTracker:
        return ConsoleTracker(self)


_command: tuple[str, ...] = ()  # the command that started this process


def set_command(words: Sequence[str]) -> None:
    """Set the command that started this process, to print commands that continue the run; empty if there is none."""
    global _command
    _command = tuple(words)


class ConsoleTracker(Tracker):
    """Prints through a rich console, by default that of the log handler.

    Args:
        settings: what to show.
        console: the rich console; None for the global one.
        clock: seconds, for the remaining time and the interval of lines.
    """

    def __init__(
        self, settings: Console, console: RichConsole | None = None, clock: Callable[[], float] = time.monotonic
    ):
        import rich

        self._settings, self._clock = settings, clock
        self._console = console or rich.get_console()
        self._total: int | None = None
        self._durations_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._stages: dict[str, float] = {}
        self._shown_at: float | None = None  # time of the last line of a step
        self._hidden: list[tuple[str, str]] = []  # lines of the last step with their styles, if they were not shown
        self._result: Mapping[str, Any] | None = None

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._total, self._last, self._run_dir = total_steps, self._clock(), run_dir
        steps = "" if total_steps is None else f", {total_steps} steps"
        self._print(f"run {run_name}{steps}", "bold")

    def stage(self, name: str, seconds: float, note: str) -> None:
        self._stages[name] = self._stages.get(name, 0.0) + seconds

    def log(self, metrics: dict[str, float], step: int) -> None:
        now = self._clock()
        self._durations_s.append(now - self._last)
        self._last = now
        line = step_line(self._count(step), self._shown(metrics), self._left(step), self._width)
        stages, self._stages = self._stages, {}
        of_step = {name: seconds for name, seconds in stages.items() if f"timing/{name}_s" in metrics}
        self._hidden = [(line, "")]
        if self._settings.stage_lines and len(of_step) > 1:
            times = [f"{name} {seconds:.2f}s" for name, seconds in of_step.items()]
            self._hidden += [(line, "dim") for line in _filled([f"  {times[0]}", *times[1:]], self._width)]
        is_first = self._shown_at is None or step == self._total
        if is_first or now - (self._shown_at or 0.0) >= self._settings.every_s:
            self._print_hidden()

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        if not self._durations_s:
            self._last = self._clock()  # step times exclude the evaluation before the first step
        cells = [f"{_label(key)} {short(value, _DIGITS)}" for key, value in metrics.items()]
        self._print_hidden()
        for line in _filled([self._count(step, "eval "), *cells], self._width):
            self._print(line, "green")

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        self._print_hidden()
        for row in rows[: self._settings.sample_rows]:
            shown = {key: value for key, value in row.items() if key not in ("episode", "pictures")}  # too long
            self._print(sample_line(f"{name} sample", shown, self._width), "cyan", wraps=False)

    def message(self, text: str) -> None:
        self._print(text)

    def result(self, summary: Mapping[str, Any]) -> None:
        self._result = summary

    def close(self, status: str) -> None:
        self._print_hidden()
        if self._result is None:
            self._print(f"run {status}", "bold")
            return
        head, *lines = result_lines(self._result, self._total, self._run_dir, _command)
        self._print(f"run {head}", "bold")
        for line in lines:
            self._print(line, wraps=False)

    def _print_hidden(self) -> None:
        """Print the lines of the last step, if they have not been printed."""
        for line, style in self._hidden:
            self._shown_at = self._last
            self._print(line, style, wraps=False)
        self._hidden = []

    @property
    def _width(self) -> int:
        return self._console.width

    def _count(self, step: int, word: str = "step ") -> str:
        return f"{word}{step}" if self._total is None else f"{word}{step}/{self._total}"

    def _shown(self, metrics: Mapping[str, float]) -> dict[str, float]:
        columns = [*self._settings.columns]
        columns[1:1] = [key for key, bound in WORTH_A_COLUMN.items() if metrics.get(key, 0.0) > bound]
        shown = {key: metrics[key] for key in columns if key in metrics}
        return shown or dict(list(metrics.items())[:4])

    def _print(self, text: str, style: str = "", *, wraps: bool = True) -> None:
        print_line(self._console, visible(text), style, wraps=wraps)

    def _left(self, step: int) -> str:
        """Remaining time as `eta m:ss`; empty if it is unknown or zero."""
        if self._total is None or step >= self._total or not self._durations_s:
            return ""
        seconds = round(sum(self._durations_s) / len(self._durations_s) * (self._total - step))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        clock = f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"
        return f"eta {clock}"


def print_line(console: RichConsole, text: str, style: str = "", *, wraps: bool = True) -> None:
    """Print plain text, wrapped at words on a terminal, unwrapped elsewhere.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    from rich.text import Text

    if wraps and console.is_terminal:
        text = "\n".join(_wrapped(line, console.width) for line in text.split("\n"))
    try:
        # soft_wrap: a pipe or file has no width, and a terminal gets lines that fit.
        console.print(Text(text, style=style), soft_wrap=True)
    except SystemExit as error:  # rich raises it for a closed pipe, which must not end training
        raise BrokenPipeError(errno.EPIPE, "the reader of standard output has closed the pipe") from error


def _wrapped(line: str, width: int) -> str:
    """Wrap at words into lines of at most `width` characters."""
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)


def step_line(count: str, metrics: Mapping[str, float], left: str, width: int) -> str:
    """The line of a step in at most `width` characters; what does not fit is left out, the remaining time first."""
    cells = [f"{_label(key)} {short(value, _DIGITS)}" for key, value in metrics.items() if key != _STEP_S]
    ends = [f"{metrics[_STEP_S]:.2f}s"] if _STEP_S in metrics else []
    while cells and len("  ".join([count, *cells, *ends])) > width:
        cells.pop()
    line = "  ".join([count, *cells, *ends])
    return f"{line}  {left}" if left and len(f"{line}  {left}") <= width else line


def sample_line(head: str, row: Mapping[str, Any], width: int) -> str:
    """A row as `key=value` cells; long values are truncated to fit, prompts in the middle. Of a chat the last message
    and the response share the line."""
    if "last_turn" in row:
        row = {key: row[key] for key in ("last_turn", "response_text", "score")}
    texts = {key: _text(value) for key, value in row.items()}
    label = {key: key.removesuffix("_text") for key in texts}
    room = width - len(head) - sum(len(label[key]) + 3 for key in texts)
    share = equal_share([len(text) for text in texts.values()], room, 8)
    cut = {key: (middle_cut if key in _FROM_BOTH_ENDS else end_cut)(text, share) for key, text in texts.items()}
    return end_cut("  ".join([head, *(f"{label[key]}={text}" for key, text in cut.items())]), width)


def result_lines(
    result: Mapping[str, Any], total: int | None, run_dir: Path, command: Sequence[str] = ()
) -> Iterator[str]:
    """Lines about the result of a run: status, metrics before -> after, directories, and commands to continue with.

    Args:
        result: as in `summary.json`, with the path `last_checkpoint`, if any.
        total: number of steps of the whole run, or None.
    """
    steps = f"{result['steps']}" if total is None else f"{result['steps']} of {total}"
    error = (result.get("error") or "").strip().partition("\n")[0]
    yield f"{result['status']} after {steps} steps, {result['wall_s']:.0f} s"
    if error:
        yield f"  {error}"
    if changed := _before_and_after(result["evaluations"]):
        yield f"  {changed}"
    directory = shown_path(run_dir)
    yield f"  results in {directory}"
    if (run_dir / PAGE).is_file():
        yield f"  page {os.path.join(directory, PAGE)}"
    if last := result.get("last_checkpoint"):
        yield f"  last checkpoint {shown_path(Path(last))}"
    if result["status"] == "restarting":
        return
    if commands := _next_commands(result, directory, run_dir, command):
        yield from ("  next:", *(f"    {line}" for line in commands))


def shown_path(path: Path) -> str:
    """A path, relative to the working directory if it is below it."""
    try:
        below = path.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):
        return str(path)
    return str(path.absolute() if below == Path() else below)


def _before_and_after(evaluations: Mapping[Any, Mapping[str, float]]) -> str:
    steps = sorted(evaluations, key=int)
    if not steps:
        return ""
    first, last = evaluations[steps[0]], evaluations[steps[-1]]
    key = next((key for key in HEADLINE if key in last), next(iter(last), None))
    if key is None or len(steps) < 2 or key not in first:
        return "" if key is None else f"{_label(key)} {short(last[key], _DIGITS)} after step {steps[-1]}"
    return (
        f"{_label(key)} {short(first[key], _DIGITS)} -> {short(last[key], _DIGITS)} "
        f"(held-out rows, step {steps[0]} -> {steps[-1]})"
    )


def _next_commands(result: Mapping[str, Any], directory: str, run_dir: Path, command: Sequence[str]) -> list[str]:
    """At most four commands, most useful first. `verl generate` tells the words to add for an environment or for code
    of the user's."""
    where, last, checkpoints = shlex.quote(directory), result.get("last_checkpoint"), bool(result.get("checkpoints"))
    goes_on = result["status"] != "finished" and bool(command) and (checkpoints or result["steps"] == 0)
    of_this_run = ("resume=", "trainer.stop_after=", "hydra.run.dir=")
    again = [*(word for word in command if not word.lstrip("+").startswith(of_this_run))]
    policies = [Path(path) for path in (*(result.get("saved") or ()), f"{last}/actor")]
    has_policy = any(path.name == "actor" and path.is_dir() and _has_base(path) for path in policies)
    commands = [
        (goes_on, shlex.join([*again, *[f"resume={directory}"] * checkpoints])),
        (result["status"] == "failed", f"less {shlex.quote(os.path.join(directory, 'run.log'))}"),
        ((run_dir / PAGE).is_file(), f"verl report {where}"),
        (has_policy, f'verl generate {where} --prompt "..."'),
        (bool(last), f"verl lineage {shlex.quote(shown_path(Path(str(last)).parent))}"),
    ]
    return [line for is_of_use, line in commands if is_of_use][:4]


def _has_base(directory: Path) -> bool:
    """Whether a saved model is whole, or an adapter that names its base model: the built-in one has no name on disk."""
    adapter = directory / "adapter_config.json"
    return not adapter.is_file() or bool(json.loads(adapter.read_text()).get("base_model_name_or_path"))


def _label(key: str) -> str:
    return _LABELS.get(key, key.removeprefix("eval/"))


def _filled(cells: Sequence[str], width: int) -> Iterator[str]:
    """The cells in lines of at most `width` characters, broken between cells only."""
    line = ""
    for cell in cells:
        if line and len(line) + 2 + len(cell) > width:
            yield line
            line = f"  {cell}"
        else:
            line = f"{line}  {cell}" if line else cell
    if line:
        yield line


def _text(value: Any) -> str:
    if isinstance(value, float):
        return short(value, _DIGITS)
    return visible(repr(value) if isinstance(value, str) else str(value))


def middle_cut(text: str, width: int) -> str:
    """Truncate to `width` characters in the middle."""
    if len(text) <= width:
        return text
    room = max(0, width - len(_CUT))
    return text[: room // 2] + _CUT + text[len(text) - (room - room // 2) :]


def equal_share(widths: Sequence[int], room: int, least: int) -> int:
    """The most characters that each text may have so that texts of these widths fit in `room`; at least `least`."""
    shares = range(max(widths, default=0), least, -1)
    return next((share for share in shares if sum(min(width, share) for width in widths) <= room), least)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    width: int = 10_000,
    cut: Sequence[str] = (),
) -> None:
    """Print a table with a header, as wide as the terminal or COLUMNS.

    Args:
        right: names of right-aligned columns.
        width: of an output that has none of its own.
        cut: columns whose cells are truncated to fit; others are folded only if there is still no room.
    """
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    if is_terminal or "COLUMNS" in os.environ:
        width = shutil.get_terminal_size().columns
    table = Table(box=None, pad_edge=False, header_style="bold" if is_terminal else "")
    shown = [["" if cell is None else printable(str(cell)) for cell in row] for row in (columns, *rows)]
    kinds = [{"no_wrap": True, "overflow": "ellipsis"} if name in cut else {} for name in columns]
    widest = [
        MIN_CUT if name in cut else max(map(len, cells)) for name, cells in zip(columns, zip(*shown), strict=True)
    ]
    fits = sum(widest) + 2 * len(columns) <= width
    head, *body = ([Text(cell, **kind) for cell, kind in zip(row, kinds, strict=True)] for row in shown)
    for name, title in zip(columns, head, strict=True):
        is_whole, justify = fits and bool(cut) and name not in cut, "right" if name in right else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=is_whole)
    for row in body:
        table.add_row(*row)
    rendered = io.StringIO()
    RichConsole(file=rendered, force_terminal=is_terminal, width=width).print(table)
    # cells are printable, and rich styles the header
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in rendered.getvalue().split("\n")[:-1]))


def visible(text: str) -> str:
    """Escape control characters, which a model may produce, except line breaks and tabs."""
    return printable(text, keep="\n\t")


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Inside this context a closed pipe at standard output, as `head` leaves it, ends the output without an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
