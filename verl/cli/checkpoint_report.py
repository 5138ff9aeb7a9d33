"""What `verl checkpoint inspect` and `diff` print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import typer

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.manifest import LogicalTensor
from verl.checkpoint.describe import CheckpointSummary, components
from verl.checkpoint.read.compare import CheckpointDifference
from verl.cli.output import counted, fail, print_table, size

FIRST_TENSORS = 8  # of a component, where not all are asked for
LONGEST_LIST = 4
LONGEST_TEXT = 80
SHOWN_ABOVE = (
    "checkpoint_version", "verl_version", "step", "epoch", "tag", "sequence", "run_id", "saved_at", "metrics",
)  # fmt: skip
SIDE_BY_SIDE = (
    ("step", "step"), ("run", "run_id"), ("saved", "saved_at"), ("verl", "verl_version"), ("format", "version"),
)  # fmt: skip


def as_json(summary: CheckpointSummary, component: str | None) -> dict[str, Any]:
    """All of a checkpoint for scripts."""
    told = summary.to_json()
    if summary.published is None:
        return told
    tensors = [
        {"component": t.component, "name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.num_bytes}
        for t in _tensors(summary.published, component)
    ]
    parts = [dataclasses.asdict(part) for part in components(summary.published)]
    return told | {"components": parts, "tensors": tensors, "trainer_state": summary.state}


def print_inspection(summary: CheckpointSummary, component: str | None, all_tensors: bool) -> None:
    """All of a checkpoint for people."""
    tensors = _tensors(summary.published, component) if summary.published else []
    for name, value in _head(summary):
        typer.echo(f"{name:<12}{value}")
    for fault in summary.faults:
        typer.echo(f"  {fault}")
    if summary.published is None:
        return
    typer.echo("")
    rows = [
        [
            part.name,
            part.num_files,
            size(part.bytes),
            part.num_tensors or "",
            part.num_elements or "",
            " ".join(part.dtypes),
        ]
        for part in components(summary.published)
    ]
    columns = ["component", "files", "size", "tensors", "elements", "types"]
    print_table(columns, rows, right=["files", "size", "tensors", "elements"])
    _print_tensors(tensors, all_tensors)
    typer.echo("\ntrainer_state.json")
    for line in outline({key: value for key, value in summary.state.items() if key not in SHOWN_ABOVE}):
        typer.echo(f"  {line}")


def print_comparison(
    one: Checkpoint, two: Checkpoint, differences: list[CheckpointDifference], with_numbers: bool
) -> None:
    """Two checkpoints side by side, then every difference."""
    rows = [[title, *(getattr(published.manifest, name) for published in (one, two))] for title, name in SIDE_BY_SIDE]
    print_table(["", one.name, two.name], rows)
    _print_different_tensors([d for d in differences if d.kind == "tensor"], with_numbers)
    _print_different([d for d in differences if d.kind == "file"], "files")
    _print_different([d for d in differences if d.kind == "key"], "settings and state")
    same = "the same tensors, files and settings" if not differences else counted(len(differences), "difference")
    typer.echo(f"\n{same}")


def outline(value: dict[str, Any]) -> Iterator[str]:
    """A nested dict as indented lines; long lists by their length and their last entry."""
    width = max((len(str(key)) for key in value), default=0) + 2
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield str(key)
            yield from (f"  {line}" for line in outline(item))
        else:
            yield f"{key!s:<{width}}{_short(item)}".rstrip()


def _head(summary: CheckpointSummary) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(summary.directory)
    yield "state", summary.status + (", the newest" if summary.is_newest else "")
    if summary.pinned is not None:
        yield "pinned", summary.pinned or "yes"
    if summary.published is None:
        return
    manifest = summary.published.manifest
    epoch = summary.state.get("epoch")
    yield "step", f"{manifest.step}" + (f", epoch {epoch}" if epoch is not None else "")
    if manifest.tag:
        yield "tag", manifest.tag
    yield "saved", f"{manifest.saved_at} by run {manifest.run_id or '(no name)'}, publication {manifest.sequence}"
    yield "written by", f"verl {manifest.verl_version}, format {manifest.version}"
    if manifest.metrics:
        yield "metrics", ", ".join(f"{name} {value:.6g}" for name, value in manifest.metrics.items())
    added = f", of which {size(summary.added_bytes)} are not shared with earlier ones"
    yield "size", f"{size(summary.published.num_bytes)} in {counted(len(manifest.contents), 'file')}{added}"


def _tensors(published: Checkpoint, component: str | None) -> list[LogicalTensor]:
    tensors = [tensor for tensor in published.manifest.tensors if component in (None, tensor.component)]
    if component is not None and not tensors:
        known = ", ".join(sorted({tensor.component for tensor in published.manifest.tensors})) or "none"
        fail(f"{published.name} has no tensors of component {component}; it has those of: {known}")
    return tensors


def _print_tensors(tensors: list[LogicalTensor], all_of_them: bool) -> None:
    if not tensors:
        return
    by_component: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        by_component.setdefault(tensor.component, []).append(tensor)
    rows: list[list[object]] = []
    for component, own in by_component.items():
        shown = own if all_of_them else own[:FIRST_TENSORS]
        rows += [[component, t.name, t.dtype, list(t.shape), len(t.slices)] for t in shown]
        if len(shown) < len(own):
            rows.append([component, f"... and {len(own) - len(shown)} more (--tensors)", "", "", ""])
    typer.echo("")
    print_table(["component", "tensor", "type", "shape", "slices"], rows, right=["slices"])


def _print_different_tensors(tensors: list[CheckpointDifference], with_numbers: bool) -> None:
    if not tensors:
        return
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.component] = counts.get(tensor.component, 0) + 1
    shown = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
    typer.echo(f"\ntensors that differ ({shown})")
    columns = ["component", "tensor", "A", "B"] + (["largest difference"] if with_numbers else [])
    rows = [[t.component, t.name, t.first, t.second] + ([_number(t)] if with_numbers else []) for t in tensors]
    print_table(columns, rows, right=["largest difference"])


def _print_different(differences: list[CheckpointDifference], title: str) -> None:
    if differences:
        typer.echo(f"\n{title} that differ")
        print_table(
            ["in", "name", "A", "B"], [[d.component, d.name, _short(d.first), _short(d.second)] for d in differences]
        )


def _number(difference: CheckpointDifference) -> str:
    return "" if difference.max_abs is None else f"{difference.max_abs:.4g}"


def _short(value: Any) -> str:
    if isinstance(value, list) and (len(value) > LONGEST_LIST or any(isinstance(item, dict) for item in value)):
        return f"{len(value)} entries, the last one {_short(value[-1])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
