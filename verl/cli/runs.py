"""`verl runs`: the runs below a directory. `verl diff`: what differs between two of them.
`verl lineage`: which run came from which checkpoint of which run, as a tree or as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.cli.console import FOUND, duration, echo, print_json, size
from verl.cli.report.read import last_start, run_status, saved_by
from verl.errors import ConfigError, end_cut
from verl.tracking.base import HEADLINE, short
from verl.tracking.console import print_table
from verl.trainer.state.lineage import forest
from verl.utils.external_input import ExternalInputError, parse_mapping, printable

if TYPE_CHECKING:
    from rich.tree import Tree

    from verl.trainer.state.compare_runs import RunComparison
    from verl.trainer.state.lineage import LineageRun

ROOTS = (Path("outputs"), Path("multirun"))
TAIL_BYTES = 2**18  # of metrics.jsonl, in which the last value of each metric is looked for
SHOWN_CHARACTERS = 60  # of a value that differs
SHOWN = 6  # limit for configuration differences and for removed checkpoints
TREE_WIDTH = 1000  # of a pipe or a file, which has none
COLORS = {"finished": "green", "stopped": "green", "interrupted": "yellow", "restarting": "yellow", "failed": "red"}


@dataclass
class ListedRun:
    """A run, from the files of its directory.

    Attributes:
        status: see `verl.cli.report.read.run_status`.
        step: of the last metrics; 0 if there are none.
        metrics: the last value of each metric.
        updated: time of the last write below its directory, in seconds since the epoch.
        parent: run id, checkpoint and step that it was resumed from, or None.
        run_ids: of the starts in this directory, the last one first; empty if it saved no checkpoints.
    """

    directory: Path
    status: str
    step: int
    metrics: dict[str, Any]
    updated: float
    size_bytes: int
    parent: dict[str, Any] | None = None
    run_ids: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "directory": str(self.directory)}


def runs(
    directory: Annotated[Path | None, typer.Argument(help="Default: outputs/ and multirun/.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Objects with all last metrics instead of a table.")] = False,
) -> None:
    """List the runs below a directory: status, last metrics, age, size, and the run that each was resumed from."""
    if directory is not None:
        _require(directory, "a run")
    roots = [root for root in ([directory] if directory else ROOTS) if root.is_dir()]
    listed = list_runs(roots)
    if as_json:
        print_json([run.as_json() for run in listed])
    elif listed:
        _print(listed)
    else:
        echo(f"There are no runs below {' or '.join(map(str, roots or ROOTS))}.")


def _require(directory: Path, what: str) -> None:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory. Give the directory of {what}, or one above.")


def list_runs(roots: Sequence[Path]) -> list[ListedRun]:
    """The runs below some directories, the last written one last."""
    files = ((Path(root), {*names}) for above in roots for root, _, names in os.walk(above))
    of_runs = [path for path, names in files if "metrics.jsonl" in names or {"config.yaml", "overrides.yaml"} <= names]
    return sorted(map(_listed, of_runs), key=lambda run: run.updated)


def last_metrics(file: Path) -> tuple[int, dict[str, Any]]:
    """The last step of a `metrics.jsonl` and the last value of each metric, from its last 256 KiB."""
    metrics: dict[str, Any] = {}
    with contextlib.suppress(OSError), open(file, "rb") as lines:
        start = max(0, lines.seek(0, os.SEEK_END) - TAIL_BYTES)
        lines.seek(start)
        for line in lines.read().split(b"\n")[1 if start else 0 :]:
            with contextlib.suppress(ExternalInputError):
                metrics |= parse_mapping(line)
    step = metrics.pop("step", 0)
    return step if isinstance(step, int) else 0, metrics


def _listed(directory: Path) -> ListedRun:
    step, metrics = last_metrics(directory / "metrics.jsonl")
    size_bytes, updated = _size_and_time(directory)
    events, saved = last_start(directory), saved_by(directory)
    ids = [] if saved is None else [saved.run_id]
    parents = [event.get("parent") for event in events if event["event"] == "run"]
    status, parent = run_status(directory, events), parents[-1] if parents else None
    return ListedRun(directory, status, step, metrics, updated, size_bytes, parent, ids)


def _size_and_time(directory: Path) -> tuple[int, float]:
    """Bytes of all files, each inode once, and the time of the last write."""
    sizes, updated = dict[tuple[int, int], int](), 0.0
    for path in (os.path.join(root, name) for root, _, names in os.walk(directory) for name in names):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = os.lstat(path)
            sizes[status.st_dev, status.st_ino] = status.st_size
            updated = max(updated, status.st_mtime)
    return sum(sizes.values()), updated


def _print(listed: Sequence[ListedRun]) -> None:
    directories = {run.run_ids[0]: run.directory for run in listed if run.run_ids}
    rows = []
    for run in listed:
        values = {key: run.metrics[key] for key in HEADLINE if key in run.metrics}
        metrics = "  ".join(f"{key} {short(x) if isinstance(x, float | int) else x}" for key, x in values.items())
        parent = "" if run.parent is None else f"step {run.parent['step']} of "
        parent += "" if run.parent is None else str(directories.get(run.parent["run_id"], run.parent["run_id"]))
        age = duration(max(0.0, time.time() - run.updated))
        rows.append([run.directory, run.status, run.step, metrics, age, size(run.size_bytes), parent])
    columns, right = ["run", "status", "step", "last metrics", "age", "size", "parent"], ["step", "age", "size"]
    print_table(columns, rows, right, cut=["last metrics", "parent"])


# -- diff --------------------------------------------------------------------------------------------------------------


def diff(
    first: Annotated[Path, typer.Argument(help="The directory of a run.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="The directory of another run.", metavar="B")],
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of lines.")] = False,
) -> None:
    """Compare settings, code, data, environment and metrics of two runs; times are left out.

    The exit status is 0 if they are equal, 1 if something differs, and 2 if a run cannot be read.
    """
    from verl.trainer.state.compare_runs import compare_runs

    comparison = compare_runs(first, second)
    if as_json:
        print_json({"equal": comparison.is_equal, **asdict(comparison)})
    else:
        _print_comparison(comparison)
    raise typer.Exit(0 if comparison.is_equal else FOUND)


def _print_comparison(comparison: RunComparison) -> None:
    for section in ("settings", "code", "data", "environment"):
        changed = comparison.differing.get(section)
        if changed is None:
            echo(f"{section:<13}not recorded by both")
            continue
        echo(f"{section:<13}{f'{len(changed)} differ' if changed else 'equal'}")
        for path, values in changed.items():
            echo(f"  {path}: {' -> '.join(map(_shown, values))}")
    echo(f"{'metrics':<13}{comparison.metrics or 'equal'}")


def lineage(
    directory: Annotated[Path, typer.Argument(help="A directory of checkpoints, or one above.")] = Path("checkpoints"),
    as_json: Annotated[bool, typer.Option("--json", help="Nested objects instead of a tree.")] = False,
) -> None:
    """Show the tree of runs and checkpoints in a directory and below it."""
    _require(directory, "checkpoints")
    roots = forest(directory)
    if as_json:
        print_json([asdict(run) for run in roots])
        return
    if not roots:
        echo(f"There are no checkpoints below {directory}.")
        return
    import rich
    from rich.console import Console
    from rich.tree import Tree

    console = rich.get_console() if rich.get_console().is_terminal else Console(width=TREE_WIDTH)
    for root in roots:
        tree = Tree(_headline(root))
        _fill(tree, root)
        console.print(tree)


def _fill(tree: Tree, run: LineageRun) -> None:
    """Add the checkpoints of a run, and below each the runs that resumed from it."""
    if run.parent is not None:
        tree.add(_text(f"from step {run.parent.step} of run {run.parent.run_id}, {run.parent.checkpoint}"))
    for line in _changes(run):
        tree.add(_text(line, "cyan"))
    by_step: dict[int, list[LineageRun]] = {}
    for child in run.children:
        assert child.parent is not None, "a child has a parent"
        by_step.setdefault(child.parent.step, []).append(child)
    gone = [saved for saved in run.checkpoints if saved.state == "pruned" and saved.step not in by_step]
    if gone:
        names = ", ".join(saved.name for saved in gone[:SHOWN]) + (" ..." if len(gone) > SHOWN else "")
        tree.add(_text(f"pruned: {names}", "dim"))
    for saved in run.checkpoints:
        if saved in gone:
            continue
        state = "" if saved.state == "there" else f"  ({saved.state})"
        branch = tree.add(_text(f"{saved.name}  {saved.time[:19]}{state}"))
        for child in by_step.pop(saved.step, []):
            _fill(branch.add(_headline(child)), child)
    for children in by_step.values():
        for child in children:
            _fill(tree.add(_headline(child)), child)


def _headline(run: LineageRun) -> Any:
    from rich.text import Text

    text = Text(printable(f"run {run.run_id}  "), style="bold")
    text.append(printable(run.status), style=COLORS.get(run.status, "yellow"))
    first = 1 if run.parent is None else run.parent.step + 1
    steps = f"steps {first} to {run.steps}" if run.steps >= first else "no step saved"
    commit = run.code.get("commit")
    changed = " and changes" if run.code.get("modified") else ""
    code = f"verl {run.code.get('verl', '?')}" + (f" at {str(commit)[:10]}{changed}" if commit else "")
    text.append(printable(f"  {steps}  {run.began[:19]}  {code}  {run.run_dir}"), style="not bold")
    return text


def _changes(run: LineageRun) -> list[str]:
    """Differences from the parent: configuration, then content of data and models."""
    changed = {} if run.parent is None else run.parent.differences
    lines = [f"{path}: {' -> '.join(map(_shown, values))}" for path, values in list(changed.items())[:SHOWN]]
    lines += [f"and {len(changed) - SHOWN} other differences"] if len(changed) > SHOWN else []
    changed = run.data_changes.items()
    return lines + [f"content of {path}: {' -> '.join(map(_shown, values))}" for path, values in changed]


def _shown(value: Any) -> str:
    if isinstance(value, list) and value:
        return ", ".join(map(_shown, value))
    if isinstance(value, dict) and len(value) == 1:  # a digest
        return str(next(iter(value.values())))[:12]
    return end_cut(value if isinstance(value, str) else json.dumps(value, default=str), SHOWN_CHARACTERS)


def _text(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(text), style=style)
