"""Ownership of a run directory: the run that trained there, which another run may continue and none may overwrite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from verl.checkpoint.read.discovery import LATEST, read_pointer
from verl.checkpoint.resume_point import ResumePoint
from verl.errors import CheckpointNotFound
from verl.tracking.console import shown_path
from verl.trainer.state.save_directory import ancestors_of
from verl.utils.external_input import ExternalInputError, open_regular, parse_mapping

LONGEST_LINE_BYTES = 2**20  # of metrics.jsonl; what is longer is no record of metrics


def run_dir_faults(run_dir: Path, resume: str | None, point: ResumePoint | None, save_dir: Path) -> Iterator[str]:
    """Fault of a run directory with training steps of another run, which this one does not resume.

    A run that ended before its first step owns nothing. A run that resumes may write where it, its ancestors, or an
    earlier start of it wrote; with `resume=latest` and no checkpoint yet, where a run with the same save directory did.

    Args:
        resume: the setting of this run.
        point: the checkpoint that it resumes from, or None.
        save_dir: where this run saves.
    """
    step = _first_step(run_dir)
    if step is None or (resume is not None and _is_resumed(run_dir, resume, point, save_dir)):
        return
    yield (
        f"hydra.run.dir is {shown_path(run_dir)}: another run has trained there ({step}), and the metrics, "
        "configuration and weights of two runs would mix. Give this run a directory of its own (hydra.run.dir=DIR; in "
        "Python, run_dir), or continue the run that wrote there with resume=latest."
    )


def _is_resumed(run_dir: Path, resume: str, point: ResumePoint | None, save_dir: Path) -> bool:
    try:
        written = read_pointer(run_dir)
    except CheckpointNotFound:
        return False
    if point is None:
        return resume == LATEST and any(
            os.path.realpath(directory) == os.path.realpath(save_dir) for directory in written.places(run_dir)[:2]
        )
    return not {written.run_id, *written.ancestors, *written.earlier}.isdisjoint(ancestors_of(point))


def _first_step(run_dir: Path) -> str | None:
    """Evidence of a completed training step, or None."""
    for name in ("summary.json", "metrics.jsonl"):
        try:
            with open(open_regular(run_dir / name), "rb") as file:
                if name == "summary.json":
                    steps = _steps(file.read(LONGEST_LINE_BYTES), "steps")
                    if steps:
                        return f"{steps} steps in {name}"
                    continue
                while line := file.readline(LONGEST_LINE_BYTES):
                    if step := _steps(line, "step"):
                        return f"step {step} in {name}"
        except OSError:  # it is missing, or no file of a run
            continue
    return None


def _steps(record: bytes, key: str) -> int:
    """The number under `key`; 0 for half a line, which a killed run leaves."""
    try:
        number = parse_mapping(record).get(key)
    except ExternalInputError:
        return 0
    return number if isinstance(number, int) else 0
