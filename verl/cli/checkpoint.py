"""`verl checkpoint`: look at checkpoints. What changes a directory is in `checkpoint_upkeep.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.describe import CheckpointSummary, age_s, summaries, summary_of
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.compare import compare
from verl.checkpoint.read.discovery import LATEST, ResolvedPath, newest_complete, resolve_path
from verl.checkpoint.read.verify import Level
from verl.cli.checkpoint_report import as_json, print_comparison, print_inspection
from verl.cli.checkpoint_store import add_to, remote_summaries
from verl.cli.output import FOUND, command, counted, duration, fail, parse_duration, print_json, print_table, size
from verl.errors import BadCheckpoint, CheckpointTooNew
from verl.storage.config import is_address

app = typer.Typer(name="checkpoint", no_args_is_help=True, help="Look at checkpoints, keep them, and take them out.")

add_to(app)
PATH = "A checkpoint, a directory of checkpoints, its `latest`, or the directory of a run."
TELLING = ("eval/accuracy", "eval/loss", "reward/mean", "sft/loss")
MOST_METRICS = 3
Path_ = Annotated[str, typer.Argument(metavar="PATH", help=PATH)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@command(app, "ls")
def list_checkpoints(path: Path_ = ".", json: Json = False) -> None:
    """List checkpoints in order of publication; the newest (*) is the one that a run would go on from."""
    found = remote_summaries(path) if is_address(path) else _summaries(resolve_path(path))
    if json:
        print_json([summary.to_json() for summary in found])
        return
    if not found:
        typer.echo(f"{path} holds no checkpoint yet")
        return
    print_table(
        ["", "checkpoint", "step", "epoch", "saved", "size", "adds", "metrics", "state"],
        [_row(summary) for summary in found],
        right=["step", "epoch", "size", "adds"],
    )


@command(app, "inspect")
def inspect(
    path: Path_,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Show every tensor, not only the first of each part.")
    ] = False,
    component: Annotated[str | None, typer.Option(help="Show the tensors of this part alone.")] = None,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds: sizes by component, tensors, and what the trainer recorded."""
    if is_address(path):
        found = remote_summaries(path)
        summary = next((one for one in reversed(found) if one.status == "complete"), found[-1])
    else:
        where = resolve_path(path)
        summary = _summaries(ResolvedPath(where.directory, where.name or LATEST))[0]
    if json:
        print_json(as_json(summary, component))
    else:
        print_inspection(summary, component, all_tensors=tensors)
    raise typer.Exit(0 if summary.status == "complete" else FOUND)


@command(app, "verify")
def verify(
    path: Path_,
    full: Annotated[bool, typer.Option("--full", help="Hash every byte; names the file and the tensor.")] = False,
    json: Json = False,
) -> None:
    """Check that checkpoints are what was written; the exit status is 1 if one is not, or if there is none."""
    level: Level = "full" if full else "quick"
    found = remote_summaries(path, level) if is_address(path) else _summaries(resolve_path(path), level)
    if json:
        print_json([summary.to_json() for summary in found])
    elif not found:
        typer.echo(f"{path} holds no checkpoint")
    else:
        for summary in found:
            holds = (
                summary.published and f"{counted(len(summary.published.manifest.contents), 'file')}, {_size(summary)}"
            )
            typer.echo(f"{summary.name}: {summary.status}" + (f" ({holds})" if holds else ""))
            for fault in summary.faults:
                typer.echo(f"  {fault}")
        typer.echo("every byte was hashed" if full else "sizes and headers were looked at; --full hashes every byte")
    raise typer.Exit(0 if found and all(summary.status == "complete" for summary in found) else FOUND)


@command(app, "diff")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=PATH)],
    second: Annotated[str, typer.Argument(metavar="B", help=PATH)],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Read the tensors that differ, and say by how much at most.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints: tensors and files by digest, settings by key. The exit status is 1 if they differ."""
    try:
        one, two = (CheckpointManager(_on_disk(path)).published for path in (first, second))
        differences = compare(one, two, numbers=tensors)
    except BadCheckpoint as error:  # not the status of a difference
        fail(str(error))
    if json:
        print_json([dataclasses.asdict(difference) for difference in differences])
    else:
        print_comparison(one, two, differences, with_numbers=tensors)
    raise typer.Exit(FOUND if differences else 0)


@command(app, "health")
def health(
    path: Annotated[str, typer.Argument(metavar="DIR", help=PATH)],
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="TIME", help="The newest must not be older: 90s, 30m, 2h, 1d.")
    ] = None,
) -> None:
    """For a readiness probe, on one line: is there a complete checkpoint to go on from?

    The exit status is 0 if there is, 1 if there is none or it is too old, 2 if that cannot be told.
    """
    limit_s = None if max_age is None else parse_duration(max_age, "--max-age")
    try:
        newest, passed_over = newest_complete(resolve_path(path))
    except CheckpointTooNew as error:
        _not_ready(f"{error.directory.name} was saved by a later version of verl")
    names = ", ".join(error.directory.name for error in passed_over)
    if newest is None:
        _not_ready(f"no complete checkpoint in {path}" + (f" (bad: {names})" if names else ""))
    age = age_s(newest)
    told = f"{newest.name}, step {newest.step}, saved {duration(age)} ago"
    if limit_s is not None and age > limit_s:
        _not_ready(f"{told}, which is more than {duration(limit_s)}")
    typer.echo(f"ready: {told}" + (f"; passed over {names}, see verl checkpoint verify" if names else ""))


def _not_ready(reason: str) -> NoReturn:
    typer.echo(f"not ready: {reason}")
    raise typer.Exit(FOUND)


def _summaries(where: ResolvedPath, level: Level = "quick") -> list[CheckpointSummary]:
    store = CheckpointStore(where.directory)
    if where.name is None:
        return summaries(store, level=level)
    if where.name == LATEST:
        return summaries(store, store.newest().name, level)
    return summaries(store, where.name, level) or [summary_of(store.disk, where.directory / where.name, level)]


def _on_disk(path: str) -> str:
    """The path, unless it is an address."""
    if is_address(path):
        resolve_path(path)  # which says what to do
    return path


def _telling(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that tell most of a checkpoint, at most three; a trainer records several dozen of each step."""
    chosen = [name for name in TELLING if name in metrics]
    return {name: metrics[name] for name in (chosen or list(metrics))[:MOST_METRICS]}


def _row(summary: CheckpointSummary) -> list[object]:
    published = summary.published
    mark = "*" if summary.is_newest else ""
    state = summary.status
    if summary.pinned is not None:
        state += f", pinned: {summary.pinned}" if summary.pinned else ", pinned"
    if summary.faults:
        state = f"{state}; {summary.faults[0]}"
    if published is None:
        return [mark, summary.name, "", "", "", "", "", "", state]
    manifest = published.manifest
    metrics = " ".join(f"{name}={value:.4g}" for name, value in _telling(manifest.metrics).items())
    sizes = [_size(summary), size(summary.added_bytes)]
    return [mark, summary.name, manifest.step, summary.state.get("epoch"), manifest.saved_at, *sizes, metrics, state]


def _size(summary: CheckpointSummary) -> str:
    return size(summary.published.num_bytes) if summary.published else ""
