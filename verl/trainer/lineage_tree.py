"""The runs of a directory as trees: which checkpoints each saved, and which runs went on from them.

lineage.jsonl files ──> events ──> runs ──> roots, whose children branch at a checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.errors import BadCheckpoint
from verl.trainer.identity import DIGEST, differences
from verl.trainer.lineage import Parent, read

State = Literal["there", "pruned", "damaged"]


@dataclass
class SavedCheckpoint:
    """A checkpoint that a run published.

    Attributes:
        state: `there`; `pruned`, or its name is another run's by now; or `damaged`: it cannot be opened.
    """

    name: str
    step: int
    time: str
    state: State


@dataclass
class Run:
    """One start of a training.

    Attributes:
        directory: of its checkpoints.
        status: as it ended, or `running or killed`.
        steps: made when it ended, or when it saved last.
        parent: the checkpoint that it went on from, or None.
        data_changes: data of the parent and of this run, by config path, where their content differs.
        children: runs that went on from its checkpoints, in order of time.
    """

    run_id: str
    directory: str
    run_dir: str
    began: str
    code: dict[str, Any]
    identity: dict[str, Any]
    parent: Parent | None = None
    status: str = "running or killed"
    steps: int = 0
    ended: str | None = None
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    data_changes: dict[str, list[Any]] = field(default_factory=dict)
    children: list[Run] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Nested mappings, children within."""
        return asdict(self)


def forest(directory: Path) -> list[Run]:
    """The runs recorded in a directory and below it: those without a parent there, in order of time."""
    runs = _runs(directory)
    roots = []
    for run in runs.values():
        above = None if run.parent is None else runs.get(run.parent.run_id)
        if above is None:
            roots.append(run)
            continue
        above.children.append(run)
        changed = differences(above.identity, run.identity)
        run.data_changes = {path: values for path, values in changed.items() if any(map(_is_content, values))}
    return roots


def _runs(directory: Path) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for event in read(directory):
        run_id, kind = event["run_id"], event["event"]
        if kind == "run":
            runs[run_id] = _begun(event)
        elif run_id not in runs:
            continue
        elif kind == "checkpoint":
            saved = SavedCheckpoint(event["checkpoint"], event["step"], event["time"], "there")
            saved.state = _state(Path(event["directory"]) / saved.name, run_id)
            runs[run_id].checkpoints.append(saved)
            runs[run_id].steps = event["step"]
        elif kind == "end":
            runs[run_id].status, runs[run_id].steps, runs[run_id].ended = event["status"], event["step"], event["time"]
    _add_unrecorded(runs)
    return runs


def _add_unrecorded(runs: dict[str, Run]) -> None:
    """Checkpoints that are there, of runs that were killed before they could write that down."""
    for directory in {run.directory for run in runs.values()}:
        for published in CheckpointDirectory(directory).complete():
            run = runs.get(published.manifest.run_id)
            if run is None or any(saved.name == published.name for saved in run.checkpoints):
                continue
            saved = SavedCheckpoint(published.name, published.step, published.manifest.saved_at, "there")
            run.checkpoints.append(saved)
            run.steps = max(run.steps, saved.step)


def _begun(event: dict[str, Any]) -> Run:
    parent = None if event.get("parent") is None else Parent(**event["parent"])
    steps = 0 if parent is None else parent.step
    facts = {name: event.get(name) or {} for name in ("code", "identity")}
    return Run(
        event["run_id"],
        event["directory"],
        event.get("run_dir", ""),
        event["time"],
        **facts,
        parent=parent,
        steps=steps,
    )


def _state(checkpoint: Path, run_id: str) -> State:
    """Of a checkpoint by that name; another run may have saved under it since."""
    if not checkpoint.is_dir():
        return "pruned"
    try:
        return "there" if open_checkpoint(FileSystem(), checkpoint).manifest.run_id == run_id else "pruned"
    except BadCheckpoint:
        return "damaged"


def _is_content(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(item, dict) and DIGEST in item for item in values)


def walk(runs: list[Run]) -> Iterator[Run]:
    """Every run of some trees, parents first."""
    for run in runs:
        yield run
        yield from walk(run.children)
