"""`verl checkpoint pin`, `unpin`, `gc`, `export`, `materialize`: what keeps, removes and takes out checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from verl.checkpoint import retention as keeping
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.export import export as export_component
from verl.checkpoint.export import materialize as write_out
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import LATEST, ResolvedPath, resolve_path
from verl.checkpoint.retention import Retention, clean, plan
from verl.cli.checkpoint import Json, Path_, app
from verl.cli.output import command, counted, print_json, size
from verl.errors import CheckpointNotFound, ConfigError
from verl.storage.config import is_address


@command(app, "pin")
def pin(
    path: Path_,
    reason: Annotated[str, typer.Option("--reason", help="Shown by ls.")] = "",
) -> None:
    """Keep a checkpoint whatever retention says, until it is unpinned."""
    where = resolve_path(path)
    store = CheckpointStore(where.directory)
    name = store.newest().name if where.name in (None, LATEST) else where.name
    keeping.pin(store, name, reason)
    typer.echo(f"pinned {store.directory / name}")


@command(app, "unpin")
def unpin(path: Path_) -> None:
    """Let retention decide again."""
    try:
        where = resolve_path(path)
    except CheckpointNotFound:  # the checkpoint may be gone and its pin not
        if is_address(path):
            raise
        given = Path(path).absolute()
        where = ResolvedPath(given.parent, given.name)
    store = CheckpointStore(where.directory)
    name = store.newest().name if where.name in (None, LATEST) else where.name
    keeping.unpin(store, name)
    typer.echo(f"unpinned {store.directory / name}")


@command(app, "gc")
def collect(
    path: Path_,
    keep_last_n: Annotated[int | None, typer.Option(help="Keep this many of those published last; else all.")] = None,
    keep_best: Annotated[str | None, typer.Option(help="Keep the best by this metric, too.")] = None,
    best_mode: Annotated[Literal["max", "min"], typer.Option(help="Whether the best value is the largest.")] = "max",
    keep_every: Annotated[int | None, typer.Option(help="Keep steps that are a multiple of this, too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove what is not kept: checkpoints by retention, leftovers of dead processes, shared files no longer shared.

    Pinned and tagged checkpoints and the two newest always stay. A trainer that is saving there is not disturbed.
    """
    where = resolve_path(path)
    if where.name is not None:
        raise ConfigError(f"PATH is {path}: it is one checkpoint. Give the directory, {where.directory}.")
    store = CheckpointStore(where.directory)
    rules = Retention(keep_last_n=keep_last_n, keep_best=keep_best, best_mode=best_mode, keep_every=keep_every)
    cleaning = plan(store, rules) if dry_run else clean(store, rules)
    if json:
        print_json({"dry_run": dry_run, **dataclasses.asdict(cleaning)})
        return
    would, verb = ("would remove", "would free") if dry_run else ("removed", "freed")
    for name in (*cleaning.removed, *cleaning.leftovers):
        typer.echo(f"{would} {name}")
    for name, reason in cleaning.kept.items():
        typer.echo(f"kept {name}: {reason}")
    typer.echo(f"{verb} {size(cleaning.freed_bytes)}")


@command(app, "export")
def export(
    path: Path_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist yet.")],
    component: Annotated[str, typer.Option(help="Which model.")] = "actor",
    pytorch_bin: Annotated[
        bool, typer.Option("--pytorch-bin", help="Write pytorch_model.bin, a plain state dict, instead of safetensors.")
    ] = False,
) -> None:
    """Write a model of a checkpoint as a plain Hugging Face directory; every byte is hashed on its way."""
    manager = CheckpointManager(path)
    names = export_component(manager, out, component, pytorch_bin)
    typer.echo(f"{component} of {manager.name} is in {out}: {counted(len(names), 'file')}")


@command(app, "materialize")
def materialize(
    path: Path_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist yet.")],
) -> None:
    """Write an incremental checkpoint with every file whole, as it would have been saved; every byte is hashed."""
    manager = CheckpointManager(path)
    whole = write_out(manager.reader(), out)
    typer.echo(f"{manager.name} is in {out}: {counted(len(whole.manifest.files), 'file')}, {size(whole.num_bytes)}")
