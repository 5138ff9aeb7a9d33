"""`verl runs`: the runs below a directory, and their removal. `verl diff`: what differs between two of them.
`verl lineage`: which run came from which checkpoint of which run, as a tree or as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.ownership import Owner, RunLock
from verl.checkpoint.read.compare import flat
from verl.checkpoint.read.discovery import PINS, RUN_LOCK, CheckpointDirectory
from verl.checkpoint.retention import pins
from verl.cli.console import FOUND, counted, duration, echo, parse_duration, print_json, size
from verl.cli.report.read import RUNNING, last_start, run_status, saved_by
from verl.errors import CheckpointError, ConfigError, end_cut
from verl.tracking.base import HEADLINE, short
from verl.tracking.console import print_table
from verl.tracking.jsonl import json_object
from verl.trainer.state.lineage import forest, read_events
from verl.utils.external_input import ExternalInputError, open_regular, parse_as, parse_mapping, printable, read_text

if TYPE_CHECKING:
    from rich.tree import Tree

    from verl.trainer.state.compare_runs import RunComparison
    from verl.trainer.state.lineage import LineageRun

ROOTS = (Path("outputs"), Path("multirun"))
CHECKPOINTS = Path("checkpoints")  # default directory of checkpoints, with the lineage of runs
TAIL_BYTES = 2**18  # of metrics.jsonl, in which the last value of each metric is looked for
SHOWN_CHARACTERS = 60  # of a value that differs
SHOWN = 6  # limit for configuration differences and for removed checkpoints
LONGEST_TEXT = 1024  # characters of a path in the settings of a run
REFERENCE = r"\$\{([\w.]+)\}"  # to another setting
TREE_WIDTH = 1000  # of a pipe or a file, which has none
Inode = tuple[int, int]  # device and number of a file or directory, the same under all of its names
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
    prune: Annotated[bool, typer.Option("--prune", help="Remove runs that have ended, after a question.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="With --prune: last written so long ago: 30m, 2h, 7d.")
    ] = "7d",
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: do not ask.")] = False,
) -> None:
    """List the runs below a directory: status, last metrics, age, size, and the run that each was resumed from.

    --prune removes directories of runs. It keeps a run that is running, a run or checkpoint that another run was
    resumed from, pinned checkpoints, and files that another run or checkpoint names. Checkpoints elsewhere stay.
    """
    if directory is not None:
        _require(directory, "a run")
    if as_json and prune:
        raise ConfigError("--json prints the runs and --prune asks before it removes some: give one of the two.")
    roots = [root for root in ([directory] if directory else ROOTS) if root.is_dir()]
    if prune:
        _prune(roots, parse_duration(older_than, "--older-than"), yes)
        return
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
    with contextlib.suppress(OSError), open(open_regular(file), "rb") as lines:
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
    sizes, updated = dict[Inode, int](), 0.0
    for path in (os.path.join(root, name) for root, _, names in os.walk(directory) for name in names):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = os.lstat(path)
            sizes[status.st_dev, status.st_ino] = status.st_size
            updated = max(updated, status.st_mtime)
    return sum(sizes.values()), updated


def _print(listed: Sequence[ListedRun], reasons: Mapping[Path, str] | None = None) -> None:
    """Print a table; `reasons` adds a column by directory."""
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
    if reasons is not None:
        columns, rows = [*columns, "stays, because"], [[*row, reasons.get(row[0], "")] for row in rows]
    print_table(columns, rows, right, drop=["parent", "size", "last metrics"], cut=["last metrics", "parent"])


# -- prune -------------------------------------------------------------------------------------------------------------


def _prune(roots: Sequence[Path], older_than_s: float, is_confirmed: bool) -> None:
    removable, reasons = _removable(roots, older_than_s)
    if reasons:
        _print([run for run in list_runs(roots) if run.directory in reasons], reasons)
        echo("")
    if not removable:
        echo(f"There is no run to remove that was last written more than {duration(older_than_s)} ago.")
        return
    _print(removable)
    question = f"Remove {counted(len(removable), 'run')}, {size(sum(run.size_bytes for run in removable))}?"
    if not is_confirmed:
        typer.confirm(question, abort=True)
    now = {run.directory for run in _removable(roots, older_than_s)[0]}  # a run may have been resumed since
    deepest = sorted(removable, key=lambda run: len(run.directory.resolve().parts), reverse=True)
    for run, real in [(run, run.directory.resolve()) for run in deepest]:  # before the working directory may go
        if run.directory not in now or not _remove(real):
            echo(f"{run.directory} is in use by now and stays")
            continue
        if run.directory.is_symlink():
            run.directory.unlink()
        echo(f"removed {run.directory}")


def _removable(roots: Sequence[Path], older_than_s: float) -> tuple[list[ListedRun], dict[Path, str]]:
    """Old runs that may be removed, and the reasons why others of that age may not, by directory."""
    _passed.cache_clear()
    tops = {Path.cwd(), *(path.parent for root in roots for path in _upwards(root) if Path(path.name) in ROOTS)}
    listed = list_runs(roots)
    beside = list_runs([top / root for top in tops for root in ROOTS])
    every = [*{_inode(run.directory): run for run in (*beside, *listed)}.values()]
    chosen = [run for run in listed if run.status != RUNNING and time.time() - run.updated >= older_than_s]
    reasons = {run.directory: why for run in chosen if (why := _protected(run)) is not None}
    events = _all_events(roots, every)
    uses = {run.directory: _named_in(json_object(run.directory / "config.yaml"), run.directory) for run in every}
    run_dirs = {event["run_id"]: Path(event.get("run_dir", "")) for event in events}
    for place in {Path(event["directory"]) for event in events}:
        with contextlib.suppress(CheckpointError):  # the base of an adapter may be in the directory of a run
            for checkpoint in CheckpointDirectory(place).survey()[0]:
                run_dir = run_dirs.get(checkpoint.manifest.run_id, place)
                with contextlib.suppress(CheckpointError):
                    tree = read_state(FileSystem(), checkpoint).get("config")
                    uses[checkpoint.directory] = _named_in(tree, run_dir)
    while True:  # a run that stays may need others
        removed = [run for run in chosen if run.directory not in reasons]
        remaining = [run for run in every if run not in removed]
        new = {run.directory: why for run in removed if (why := _needed_by(run, remaining, removed, events, uses))}
        if not new:
            return removed, reasons
        reasons |= new


def _all_events(roots: Sequence[Path], listed: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """Starts of runs recorded below some directories, in the default directory, and wherever a listed run saves."""
    below = {path.resolve() for path in (*roots, *ROOTS, CHECKPOINTS) if path.is_dir()}
    saved = {place for run in listed for place in _save_dirs(run.directory)}
    events = itertools.chain(*map(read_events, below), *(read_events(path, below=False) for path in saved))
    return [event for event in events if event["event"] == "run"]


def _save_dirs(run_dir: Path) -> list[Path]:
    return [] if (saved := saved_by(run_dir)) is None else saved.places(run_dir)


def _needed_by(
    run: ListedRun,
    remaining: Sequence[ListedRun],
    removed: Sequence[ListedRun],
    events: Sequence[Mapping[str, Any]],
    uses: Mapping[Path, frozenset[Inode]],
) -> str | None:
    """Why a run must stay if `removed`, this one among them, were removed and `remaining` not; None if it need not.

    Args:
        events: recorded starts of runs.
        uses: what each run and each checkpoint names, see `_named_in`.
    """
    here, gone = _inode(run.directory), {_inode(other.directory) for other in removed}
    saved_here = {event["run_id"] for event in events if here in _passed(Path(event["directory"]))}
    for event in events:
        if (parent := event.get("parent")) is None:
            continue
        if here in _passed(Path(parent["checkpoint"]).absolute()) or (
            parent["run_id"] in saved_here and event["run_id"] != parent["run_id"]
        ):
            return f"run {event['run_id']} was resumed from a checkpoint in it"
        child = Path(event.get("run_dir", ""))
        if parent["run_id"] in run.run_ids and child.is_dir() and _inode(child) not in gone:
            return f"{child} was resumed from it"
    for other in remaining:
        if here in _passed(other.directory.absolute()):
            return f"it contains {other.directory}"
    for user, used in uses.items():
        if here in used and gone.isdisjoint(_passed(user.absolute())):
            return f"{user} names files in it"
    return None


def _protected(run: ListedRun) -> str | None:
    """Why a run stays whatever the others name: it may be running, or a checkpoint of it is pinned."""
    if (host := _lock_host(run.directory)) not in ("", socket.gethostname()):
        return f"its lock is of {host}, where it may be running: if it is not, remove its {RUN_LOCK}"
    inside = [Path(root) for root, names, _ in os.walk(run.directory) if PINS in names]
    for directory in (*inside, *_save_dirs(run.directory)):
        store = CheckpointStore(directory)
        try:
            pinned = {*pins(store)}
            if pinned and directory not in inside:  # of several runs; in this one the pin of a damaged one counts too
                pinned &= {x.name for x in store.survey()[0] if x.manifest.run_id in run.run_ids}
        except CheckpointError as error:
            return f"its checkpoints cannot be read: {error}"
        if pinned:
            return f"{directory / min(pinned)} is pinned"
    return None


def _named_in(tree: Any, run_dir: Path) -> frozenset[Inode]:
    """Files and directories that the settings of a run, or of a checkpoint of it, lead to, see `_passed`. A run was
    started in a directory above its own, or in this one.
    """
    settings = {key: str(value) for key, value in flat(tree)}
    text = re.sub(REFERENCE, lambda key: settings.get(key[1], ""), json.dumps(tree, ensure_ascii=False))
    paths = [os.path.expanduser(x.removeprefix("file://")) for x in {*text.split('"')} if "/" in x]
    used: set[Inode] = set()
    for place in dict.fromkeys([Path.cwd(), *run_dir.resolve().parents]):
        for path in paths:
            if len(path) <= LONGEST_TEXT and os.path.lexists(place / (path.partition("/")[0] or "/")):
                used |= _passed(place / path)
    return frozenset(used)


@functools.lru_cache(maxsize=2**18)
def _passed(path: Path) -> frozenset[Inode]:
    """Every directory and file that the resolution of a path passes, as far as it exists, symbolic links followed."""
    passed = frozenset() if path == path.parent else _passed(path.parent)  # not normalised: a/../b needs a
    if (inode := _inode(path)) is None:
        return passed
    target = _passed(path.parent / os.readlink(path)) if path.is_symlink() else frozenset()
    return passed | target | {inode}


def _inode(path: Path) -> Inode | None:
    """Device and number of what a path leads to, which are the same under all of its names; None if it is not there."""
    try:
        return (status := path.stat()).st_dev, status.st_ino
    except (OSError, ValueError):
        return None


def _upwards(path: Path) -> list[Path]:
    """A path without links, and the directories above it."""
    return [(real := Path(os.path.realpath(path))), *real.parents]


def _lock_host(run_dir: Path) -> str:
    """The machine in the lock file of a run that did not end in order; empty if there is no such file."""
    with contextlib.suppress(OSError, ExternalInputError):
        return parse_as(Owner, read_text(run_dir / RUN_LOCK, errors="replace")).host
    return ""


def _remove(run_dir: Path) -> bool:
    """Remove the directory of a run, whose path is absolute, under its lock. False if another process has the lock."""
    lock = RunLock(run_dir, Owner.here(), "DIR")
    if lock.acquire() is not None:
        return False
    try:
        unnamed = run_dir.with_name(f".{run_dir.name}.removed")  # nobody starts a run in this directory
        run_dir.rename(unnamed)
        shutil.rmtree(unnamed)
    finally:
        lock.release()
    return True


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
        print_json([run.as_json() for run in roots])
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
