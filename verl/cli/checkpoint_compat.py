"""`verl-checkpoint-compat`: which checkpoints another version of verl could not read."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from packaging.version import Version

import verl
from verl.checkpoint.core.checkpoint import (
    FORMATS,
    FormatFinding,
    findings,
    format_of,
    is_ahead,
    parse_version,
)
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.resolve import resolve_path
from verl.cli.console import FOUND, counted, echo, one_line_errors, print_json
from verl.tracking.console import print_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("verl-checkpoint-compat")
@one_line_errors()
def compat(
    path: Annotated[str, typer.Argument(metavar="DIR", help="Checkpoints, or one of them.")],
    moving_from: Annotated[str, typer.Option("--from", metavar="VERSION", help="Of verl, that saved them: v0.1.0.")],
    moving_to: Annotated[str, typer.Option("--to", metavar="VERSION", help="Of verl, that is to read them.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List which checkpoints another version of verl could not read, and why.

    The exit status is 0 if all can be read, 1 if one cannot, 2 if it cannot be determined.
    """
    old, new = parse_version(moving_from, "--from"), parse_version(moving_to, "--to")
    where = resolve_path(path)
    directory = CheckpointDirectory(where.directory)
    if where.name is None:
        checked = findings(directory.candidates(), old, new)
    else:
        name = where.open().name if where.name == "latest" else where.name
        checked = findings([where.directory / name], old, new)
    broken = [finding for finding in checked if finding.breaks]
    if json:
        print_json(
            {"formats": [row._asdict() for row in FORMATS], "checkpoints": list(map(dataclasses.asdict, checked))}
        )
    else:
        _print(checked, old, new)
    raise typer.Exit(FOUND if broken else 0)


def _print(checked: list[FormatFinding], old: Version, new: Version) -> None:
    print_table(["verl", "writes format"], [["from " + row.verl, row.writes] for row in FORMATS])
    for version in (old, new):
        row = format_of(version)
        formats = "has no checkpoints of this kind" if row is None else f"writes format {row.writes}"
        later = f" or a later one; it promises to read what verl {verl.__version__} reads" if is_ahead(version) else ""
        echo(f"verl {version} {formats}{later}")
    echo("")
    rows = [
        [f.name, f.format_version, f.verl_version, f"BREAKS: {f.breaks}" if f.breaks else "can be read", f.note]
        for f in checked
    ]
    if rows:
        print_table(["checkpoint", "format", "by verl", f"with verl {new}", ""], rows)
    broken = sum(finding.breaks is not None for finding in checked)
    echo(f"\n{broken} of {counted(len(checked), 'checkpoint')} would break")


if __name__ == "__main__":
    app(prog_name="verl-checkpoint-compat")
