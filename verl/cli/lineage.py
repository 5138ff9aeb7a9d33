"""`verl lineage`: which run came from which checkpoint of which run, as a tree or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.cli.console import echo, one_line_errors
from verl.errors import ConfigError
from verl.utils.external_input import printable

if TYPE_CHECKING:
    from rich.tree import Tree

    from verl.trainer.state.lineage import LineageRun

SHOWN = 6  # limit for configuration differences and for removed checkpoints
WIDTH = 1000  # of a pipe or a file, which has none
COLORS = {"finished": "green", "stopped": "green", "interrupted": "yellow", "restarting": "yellow", "failed": "red"}


def lineage(
    directory: Annotated[Path, typer.Argument(help="A directory of checkpoints, or one above.")] = Path("checkpoints"),
    as_json: Annotated[bool, typer.Option("--json", help="Nested objects instead of a tree.")] = False,
) -> None:
    """Show the tree of runs and checkpoints in a directory and below it."""
    from verl.trainer.state.lineage import forest

    with one_line_errors():
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory. Give the directory of checkpoints, or one above it.")
        _show(directory, forest(directory), as_json)


def _show(directory: Path, roots: Sequence[LineageRun], as_json: bool) -> None:
    if as_json:
        echo(json.dumps([run.as_json() for run in roots], indent=2))
        return
    if not roots:
        echo(f"There are no checkpoints below {directory}.")
        return
    import rich
    from rich.console import Console
    from rich.tree import Tree

    console = rich.get_console() if rich.get_console().is_terminal else Console(width=WIDTH)
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
    lines = [f"{path}: {' -> '.join(map(_value, values))}" for path, values in list(changed.items())[:SHOWN]]
    lines += [f"and {len(changed) - SHOWN} other differences"] if len(changed) > SHOWN else []
    data = [f"content of {path}: {' -> '.join(map(_value, values))}" for path, values in run.data_changes.items()]
    return lines + data


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        return ", ".join(map(_value, value))
    if isinstance(value, dict) and len(value) == 1:  # a digest
        return str(next(iter(value.values())))[:12]
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(text), style=style)
