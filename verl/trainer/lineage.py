"""Which run came from which checkpoint of which run: one line for each event in `lineage.jsonl` beside the checkpoints.

{"event": "run", "run_id": ..., "parent": {...} or null, "run_dir": ..., "code": ..., "config": ..., "data": ...}
{"event": "checkpoint", "run_id": ..., "checkpoint": "global_step_100", "step": 100}
{"event": "end", "run_id": ..., "status": "finished", "step": 300}
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import verl
from verl.utils.saved_targets import current_targets

FILE = "lineage.jsonl"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parent:
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


class Lineage:
    """The record of one run.

    Args:
        directory: of the checkpoints.
    """

    def __init__(self, directory: Path, run_id: str):
        self.file, self.run_id = directory / FILE, run_id

    def add(self, event: str, **facts: Any) -> None:
        """Append a line; a directory that cannot be written costs the record, not the run."""
        line = {"event": event, "run_id": self.run_id, "time": _now(), **facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab+") as file:
                torn = file.seek(0, os.SEEK_END) > 0 and _last_byte(file) != b"\n"  # by a run that was killed
                file.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")
        except OSError as error:
            _log.warning("%s was not written: %s", self.file, error)


def read(directory: Path) -> list[dict[str, Any]]:
    """The events recorded in a directory and all below it, in order of time; half a line is passed over."""
    events = []
    for file in sorted(Path(directory).rglob(FILE)):
        for line in file.read_text(errors="replace").splitlines():
            try:
                events.append({**current_targets(json.loads(line)), "directory": str(file.parent)})
            except ValueError:
                continue
    return sorted(events, key=lambda event: event["time"])


def code_version() -> dict[str, Any]:
    """Version of verl and, where the code lies in a git repository, its commit and whether files differ from it."""
    found: dict[str, Any] = {"verl": verl.__version__}
    where = Path(verl.__file__).parent
    try:
        commit = _git(where, "rev-parse", "HEAD")
        found |= {"commit": commit, "modified": bool(_git(where, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        pass
    return found


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", where, *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _now() -> str:
    seconds, rest = divmod(time.time_ns(), 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:06d}Z"
