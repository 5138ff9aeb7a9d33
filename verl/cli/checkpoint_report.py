"""The output of `verl checkpoint inspect` and `diff`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from packaging.version import Version

import verl
from verl.checkpoint.core.checkpoint import (
    FORMATS,
    Checkpoint,
    FormatFinding,
    findings,
    format_of,
    is_ahead,
    loss_points,
    parse_version,
)
from verl.checkpoint.core.manifest import LogicalTensor
from verl.checkpoint.describe import CheckpointSummary, components
from verl.checkpoint.read.compare import CheckpointDifference, flat
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.resolve import resolve_path
from verl.cli.console import FOUND, counted, echo, fail, one_line_errors, print_json, size
from verl.tracking.base import headline
from verl.tracking.console import print_table

FIRST_TENSORS = 4  # shown per component without --tensors
FIRST_METRICS = 7
LONGEST_LIST = 4
LONGEST_TEXT = 80
SHOWN_ABOVE = (
    "checkpoint_version", "verl_version", "step", "epoch", "tag", "sequence", "run_id", "saved_at", "metrics",
)  # fmt: skip
SIDE_BY_SIDE = (
    ("step", "step"), ("run", "run_id"), ("saved", "saved_at"), ("verl", "verl_version"), ("format", "version"),
)  # fmt: skip


def as_json(summary: CheckpointSummary, component: str | None) -> dict[str, Any]:
    """The summary of a checkpoint as JSON values."""
    report = summary.to_json()
    if summary.checkpoint is None:
        return report
    tensors = [
        {"component": t.component, "name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.num_bytes}
        for t in _tensors(summary.checkpoint, component)
    ]
    parts = [dataclasses.asdict(part) for part in components(summary.checkpoint)]
    return report | {"components": parts, "tensors": tensors, "trainer_state": summary.state}


def print_inspection(
    summary: CheckpointSummary, component: str | None, all_tensors: bool, all_state: bool = False
) -> None:
    """Print a checkpoint on about a page; of tensors the first of each component, of the trainer state an outline."""
    tensors = _tensors(summary.checkpoint, component) if summary.checkpoint else []
    for name, value in _head(summary):
        echo(f"{name:<12}{value}")
    for fault in summary.faults:
        echo(f"  {fault}")
    if summary.checkpoint is None:
        return
    echo("")
    rows = [
        [x.name, x.num_files, size(x.bytes), x.num_tensors or "", x.num_elements or "", " ".join(x.dtypes)]
        for x in components(summary.checkpoint)
    ]
    columns = ["component", "files", "size", "tensors", "elements", "types"]
    print_table(columns, rows, right=["files", "size", "tensors", "elements"])
    _print_tensors(tensors, all_tensors)
    state = {key: value for key, value in summary.state.items() if key not in SHOWN_ABOVE}
    if points := loss_points(summary.state):
        step, loss = points[-1]
        state["loss_history"] = f"{counted(len(points), 'step')}, the last one step {step}, loss {loss:.6g}"
    echo("\ntrainer_state.json" + ("" if all_state else " (--state shows all of it)"))
    shown = dict(flat(state)) if all_state else state
    width = max(map(len, shown), default=0) + 2
    for key, value in shown.items():
        echo(f"  {key:<{width}}{counted(len(value), 'value') if isinstance(value, dict) else _short(value)}".rstrip())


def print_comparison(
    one: Checkpoint, two: Checkpoint, differences: list[CheckpointDifference], with_numbers: bool
) -> None:
    """Print two checkpoints side by side, then all differences."""
    rows = [[title, *(getattr(checkpoint.manifest, name) for checkpoint in (one, two))] for title, name in SIDE_BY_SIDE]
    print_table(["", one.name, two.name], rows)
    _print_different([d for d in differences if d.kind == "tensor"], "tensors", with_numbers)
    _print_different([d for d in differences if d.kind == "file"], "files")
    _print_different([d for d in differences if d.kind == "key"], "settings and state")
    same = "the same tensors, files and settings" if not differences else counted(len(differences), "difference")
    echo(f"\n{same}")


def _head(summary: CheckpointSummary) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(summary.directory)
    yield "state", summary.status + (", the newest" if summary.is_newest else "")
    if summary.pinned is not None:
        yield "pinned", summary.pinned or "yes"
    if summary.checkpoint is None:
        return
    manifest = summary.checkpoint.manifest
    epoch = summary.state.get("epoch")
    yield "step", f"{manifest.step}" + (f", epoch {epoch}" if epoch is not None else "")
    if manifest.tag:
        yield "tag", manifest.tag
    yield "saved", f"{manifest.saved_at} by run {manifest.run_id or '(no name)'}, publication {manifest.sequence}"
    yield "written by", f"verl {manifest.verl_version}, format {manifest.version}"
    if manifest.metrics:
        shown = headline(manifest.metrics, FIRST_METRICS)
        more = len(manifest.metrics) - len(shown)
        text = ", ".join(f"{name} {value:.6g}" for name, value in shown.items())
        yield "metrics", text + (f", and {more} more (--json)" if more else "")
    added = f", of which {size(summary.added_bytes)} are not shared with earlier ones"
    yield "size", f"{size(summary.checkpoint.num_bytes)} in {counted(len(manifest.contents), 'file')}{added}"


def _tensors(checkpoint: Checkpoint, component: str | None) -> list[LogicalTensor]:
    tensors = [tensor for tensor in checkpoint.manifest.tensors if component in (None, tensor.component)]
    if component is not None and not tensors:
        known = ", ".join(sorted({tensor.component for tensor in checkpoint.manifest.tensors})) or "none"
        fail(f"{checkpoint.name} has no tensors of component {component}; it has those of: {known}")
    return tensors


def _print_tensors(tensors: list[LogicalTensor], all_of_them: bool) -> None:
    if not tensors:
        return
    by_component: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        by_component.setdefault(tensor.component, []).append(tensor)
    rows: list[list[object]] = []
    for component, of_component in by_component.items():
        shown = of_component if all_of_them else of_component[:FIRST_TENSORS]
        rows += [[component, t.name, t.dtype, list(t.shape), len(t.slices)] for t in shown]
        if len(shown) < len(of_component):
            rows.append([component, f"... and {len(of_component) - len(shown)} more (--tensors)", "", "", ""])
    echo("")
    print_table(["component", "tensor", "type", "shape", "slices"], rows, right=["slices"])


def _print_different(differences: list[CheckpointDifference], title: str, with_numbers: bool = False) -> None:
    if not differences:
        return
    counts = Counter(difference.component for difference in differences)
    echo(f"\n{title} that differ ({', '.join(f'{name}: {count}' for name, count in sorted(counts.items()))})")
    columns, rows = ["component", "name", "A", "B"], []
    for d in differences:
        rows.append([d.component, d.name, _short(d.first), _short(d.second)])
        if with_numbers:
            rows[-1].append("" if d.max_abs is None else f"{d.max_abs:.4g}")
    print_table([*columns, *["largest difference"] * with_numbers], rows, right=["largest difference"])


def _short(value: Any) -> str:
    if isinstance(value, list) and (len(value) > LONGEST_LIST or any(isinstance(item, dict) for item in value)):
        return f"{len(value)} entries, the last one {_short(value[-1])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


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
    print_table(
        ["verl", "writes format", "reads from"], [["from " + row.verl, row.writes, row.reads_from] for row in FORMATS]
    )
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
