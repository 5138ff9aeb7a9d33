"""Lineage: which run came from which checkpoint of which run, recorded in `lineage.jsonl` beside the checkpoints.

{"event": "run", "run_id": ..., "parent": {...} or null, "run_dir": ..., "code": ..., "config": ..., "data": ...}
{"event": "checkpoint", "run_id": ..., "checkpoint": "global_step_100", "step": 100}
{"event": "end", "run_id": ..., "status": "finished", "step": 300}

lineage.jsonl files ──> events ──> runs ──> a tree whose children branch at a checkpoint
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import verl
from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.resolve import RunCheckpoints
from verl.errors import BadCheckpoint
from verl.tracking.jsonl import json_lines
from verl.trainer.state.training_identity import DIGEST, differences, training_differences
from verl.utils.env_check import ENGINE_PACKAGES, ENGINE_VARIABLES, accelerator, installed, num_cores, processor_name
from verl.utils.external_input import (
    ExternalInputError,
    checked_as,
    checked_name,
    ends_with_partial_line,
)
from verl.utils.seeding import CUBLAS_WORKSPACE

if TYPE_CHECKING:
    from verl.checkpoint.resolve import ResumePoint

FILE = "lineage.jsonl"
ENVIRONMENT = "environment.json"  # in the run directory
PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", *ENGINE_PACKAGES, "ray")
KERNEL_VARIABLES = (  # prefixes of variables that choose kernels
    *("ATEN_CPU_", "CUBLAS_", "DNNL_", "KMP_", "MKL_", "NVIDIA_TF32", "ONEDNN_", "TORCH_ALLOW_TF32"),
    *ENGINE_VARIABLES,
)
MAX_DEPTH = 60  # of a tree of runs, each of which is read and printed within its parent

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParentCheckpoint:
    """The checkpoint that a run went on from.

    Attributes:
        run_id: of the run that saved it.
        checkpoint: its directory.
        step: training steps done.
        differences: of the configuration, from the parent's to this run's, by path.
    """

    run_id: str
    checkpoint: str
    step: int
    differences: dict[str, list[Any]]


def parent_of(point: ResumePoint, config: Mapping[str, Any]) -> ParentCheckpoint:
    """The checkpoint as the origin of a run with a configuration."""
    differing = training_differences(point.state.get("config", {}), config)
    manifest = point.checkpoint.manifest
    return ParentCheckpoint(manifest.run_id, str(point.checkpoint.directory), point.step, differing)


class Lineage:
    """The record of one run.

    Args:
        directory: of the checkpoints.
    """

    def __init__(self, directory: Path, run_id: str):
        self.file, self.run_id = directory / FILE, run_id

    def add(self, event: str, **facts: Any) -> None:
        """Append a line; a directory that cannot be written costs the record, not the run."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        line = {"event": event, "run_id": self.run_id, "time": now, **facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "ab+") as file:
                before = b"\n" if ends_with_partial_line(file) else b""
                file.write(before + json.dumps(line).encode() + b"\n")
        except OSError as error:
            _log.warning("%s was not written: %s", self.file, error)


@dataclass
class LineageEvent:
    """The types of a line of the record."""

    event: str
    run_id: str
    time: str


@dataclass
class RunEvent(LineageEvent):
    run_dir: str = ""
    code: dict[str, Any] | None = None
    identity: dict[str, Any] | None = None
    parent: ParentCheckpoint | None = None


@dataclass
class CheckpointEvent(LineageEvent):
    checkpoint: str
    step: int


@dataclass
class EndEvent(LineageEvent):
    status: str
    step: int


_KINDS: dict[Any, type[LineageEvent]] = {"run": RunEvent, "checkpoint": CheckpointEvent, "end": EndEvent}


def read_events(directory: Path, below: bool = True) -> list[dict[str, Any]]:
    """The events recorded in a directory and all below it, in order of time; half a line is passed over.

    Args:
        below: False for the directory alone, as of a name that a file of others gives: it may be `/`.
    """
    events = []
    for file in sorted(Path(directory).glob(f"**/{FILE}" if below else FILE)):
        for entry in json_lines(file):
            with contextlib.suppress(ExternalInputError):
                checked_as(_KINDS.get(str(entry.get("event")), LineageEvent), entry)
                if entry["event"] == "checkpoint":
                    checked_name(entry["checkpoint"])
                events.append({**entry, "directory": str(file.parent)})
    return sorted(events, key=lambda event: event["time"])


def events_of(saved: RunCheckpoints, run_dir: Path) -> list[dict[str, Any]]:
    """The events of the last start of a training in a run directory, in order of time; empty if there is no record."""
    for directory in saved.places(run_dir):
        if (directory / FILE).is_file():
            return [event for event in read_events(directory, below=False) if event["run_id"] == saved.run_id]
    return []


def code_version() -> dict[str, Any]:
    """Version of verl and, where the code lies in a git repository, its commit and whether files differ from it."""
    version: dict[str, Any] = {"verl": verl.__version__}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
        version |= {"commit": commit, "modified": bool(changed)}
    return version


def record_environment(run_dir: Path, code: Mapping[str, Any]) -> None:
    """Write `environment.json`: code, versions of packages, threads and device of a run.

    A directory that cannot be written costs the record, not the run.
    """
    record = {"code": dict(code)} | environment_record()
    try:
        (run_dir / ENVIRONMENT).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    except OSError as error:
        _log.warning("%s was not written: %s", run_dir / ENVIRONMENT, error)


def environment_record() -> dict[str, Any]:
    """Versions of packages, hardware, threads and variables, on which the bits of a run depend."""
    import torch

    from verl.ops.cpu_matmul import active_library

    chosen = sorted(item for item in os.environ.items() if item[0].startswith(KERNEL_VARIABLES))
    variables = dict(item for item in chosen if item != CUBLAS_WORKSPACE)  # which verl itself sets
    return ({"variables": variables} if variables else {}) | {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "device": accelerator(),
        "num_cores": num_cores(),
        "num_threads": torch.get_num_threads(),
        "cpu_matmul": active_library(),
    }


def _git(*arguments: str) -> str:
    where = Path(verl.__file__).parent
    done = subprocess.run(["git", "-C", where, *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


RunStatus = Literal["there", "pruned", "damaged"]


@dataclass
class LineageCheckpoint:
    """A checkpoint that a run published.

    Attributes:
        state: `there`; `pruned`, or its name is another run's by now; or `damaged`: it cannot be opened.
    """

    name: str
    step: int
    time: str
    state: RunStatus


@dataclass
class LineageRun:
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
    parent: ParentCheckpoint | None = None
    status: str = "running or killed"
    steps: int = 0
    ended: str | None = None
    checkpoints: list[LineageCheckpoint] = field(default_factory=list)
    data_changes: dict[str, list[Any]] = field(default_factory=dict)
    children: list[LineageRun] = field(default_factory=list)


def forest(directory: Path) -> list[LineageRun]:
    """The runs recorded in a directory and below it: those without a parent there, in order of time.

    A run below `MAX_DEPTH` others, or whose parent began later, begins a tree of its own; its `parent` is as recorded.
    """
    runs = _runs(directory)
    depths: dict[str, int] = {}  # number of runs above each in its tree
    roots = []
    for run in runs.values():
        depth = 0 if run.parent is None else depths.get(run.parent.run_id, -1) + 1
        depths[run.run_id] = depth % MAX_DEPTH
        if run.parent is None or not depths[run.run_id]:
            roots.append(run)
            continue
        above = runs[run.parent.run_id]
        above.children.append(run)
        changed = differences(above.identity, run.identity)
        run.data_changes = {path: values for path, values in changed.items() if any(map(is_content, values))}
    return roots


def _runs(directory: Path) -> dict[str, LineageRun]:
    runs: dict[str, LineageRun] = {}
    for event in read_events(directory):
        run_id, kind = event["run_id"], event["event"]
        if kind == "run":
            parent = None if event.get("parent") is None else checked_as(ParentCheckpoint, event["parent"])
            runs[run_id] = LineageRun(
                run_id, event["directory"], event.get("run_dir", ""), event["time"], event.get("code") or {},
                event.get("identity") or {}, parent, steps=0 if parent is None else parent.step,
            )  # fmt: skip
        elif run_id not in runs:
            continue
        elif kind == "checkpoint":
            saved = LineageCheckpoint(event["checkpoint"], event["step"], event["time"], "there")
            saved.state = _state(Path(event["directory"]) / saved.name, run_id)
            runs[run_id].checkpoints.append(saved)
            runs[run_id].steps = event["step"]
        elif kind == "end":
            runs[run_id].status, runs[run_id].steps, runs[run_id].ended = event["status"], event["step"], event["time"]
    _add_unrecorded(runs)
    return runs


def _add_unrecorded(runs: dict[str, LineageRun]) -> None:
    """Checkpoints that are there, of runs that were killed before they could write that down."""
    for directory in {run.directory for run in runs.values()}:
        for checkpoint in CheckpointDirectory(directory).complete():
            run = runs.get(checkpoint.manifest.run_id)
            if run is None or any(saved.name == checkpoint.name for saved in run.checkpoints):
                continue
            saved = LineageCheckpoint(checkpoint.name, checkpoint.step, checkpoint.manifest.saved_at, "there")
            run.checkpoints.append(saved)
            run.steps = max(run.steps, saved.step)


def _state(checkpoint: Path, run_id: str) -> RunStatus:
    """State of a checkpoint by that name; another run may have saved under it since."""
    if not checkpoint.is_dir():
        return "pruned"
    try:
        return "there" if open_checkpoint(FileSystem(), checkpoint).manifest.run_id == run_id else "pruned"
    except BadCheckpoint:
        return "damaged"


def is_content(value: Any) -> bool:
    """Whether a value of an identity is the digest of a file or directory, or has one among its items."""
    values = value if isinstance(value, list) else [value]
    return any(isinstance(item, dict) and DIGEST in item for item in values)
