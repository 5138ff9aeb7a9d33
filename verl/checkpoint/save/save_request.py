"""The record of one save, its outcome, and the reports of several processes that write one save together.

Does not import torch, because the writer process imports it too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.commit.rank_writer import FileImage, RankReport
from verl.checkpoint.commit.store import REPORTS
from verl.checkpoint.core.filesystem import FileSystem, files_below, make_directories, write_by_rename, write_errors
from verl.checkpoint.core.hashing import Leaf
from verl.checkpoint.core.manifest import LogicalTensor
from verl.errors import CheckpointIncomplete, FileFault
from verl.utils.external_input import checked_as, parse_mapping

log = logging.getLogger(__name__)

NONCE = "nonce"
REPORT_LIMIT_BYTES = 2**28
LATE_S = 900.0  # a participant without progress for this long is treated as lost
POLL_INTERVAL_S = 0.005
SIZES_EVERY_S = 5.0  # how often the files of other participants are measured


@dataclass(frozen=True, kw_only=True)
class MultiWriterSave:
    """A process's part in a save that several processes write; plain values.

    Args:
        directory: the staging directory, which the driver opened.
        name: of this participant; `main` waits for the others and commits.
        others: names of the participants that `main` waits for.
        late_s: seconds without progress of the others after which `main` stops waiting.
    """

    directory: Path
    name: str
    others: tuple[str, ...] = ()
    late_s: float = LATE_S

    @property
    def commits(self) -> bool:
        """Whether this participant publishes the checkpoint."""
        return self.name == "main"


def open_report_directory(disk: FileSystem, directory: Path, nonce: str) -> None:
    """Create the directory of reports in a staging directory, with a nonce that lets other processes identify it."""
    with write_errors("opening a save for several processes"):
        make_directories(disk, directory / REPORTS, directory)
        write_by_rename(disk, directory / REPORTS / NONCE, nonce.encode())


def sees_nonce(disk: FileSystem, directory: Path, nonce: str) -> bool:
    """Whether this process sees the directory that the driver opened, not another one of the same name."""
    try:
        return disk.read(directory / REPORTS / NONCE, 1024) == nonce.encode()
    except OSError:
        return False


def submit_report(disk: FileSystem, directory: Path, report: RankReport) -> None:
    """Publish the report of one participant to `main`."""
    with write_errors(f"reporting what {report.name} wrote"):
        write_by_rename(disk, directory / REPORTS / report.name, json.dumps(asdict(report)).encode())


def submit_failure(disk: FileSystem, directory: Path, name: str, error: str) -> None:
    """Report that a participant failed or is lost, unless it has already reported or the save was abandoned."""
    path = directory / REPORTS / name
    with contextlib.suppress(OSError):
        if name not in disk.names(directory / REPORTS):
            write_by_rename(disk, path, json.dumps({"error": error}).encode())


def collect_reports(
    disk: FileSystem, directory: Path, names: Sequence[str], late_s: float = LATE_S
) -> list[RankReport]:
    """Wait for the reports of all participants. The files of reports remain until the save is published.

    Reports are in the order of `names`, so that equal content gives an equal manifest.

    Args:
        late_s: seconds without a new report or a change in the staging directory.
    Raises:
        CheckpointIncomplete: a participant failed or is late; with names and reasons.
    """
    reports: dict[str, RankReport] = {}
    idle_s, pause_s, sizes = 0.0, min(SIZES_EVERY_S, late_s), dict[str, int]()
    next_look = time.monotonic() + pause_s
    while True:
        with write_errors("looking for reports"):
            for name in (x for x in disk.names(directory / REPORTS) if x in names and x not in reports):
                reports[name] = _report(name, disk.read(directory / REPORTS / name, REPORT_LIMIT_BYTES), directory)
                idle_s = 0.0
            if len(reports) == len(names):
                return [reports[name] for name in names]
            if time.monotonic() >= next_look:  # counted in looks: time in which this process was stopped is not idle
                next_look, idle_s = time.monotonic() + pause_s, idle_s + pause_s
                before, sizes = sizes, files_below(disk, directory)[0]
                idle_s = 0.0 if sizes != before else idle_s
        if idle_s >= late_s:
            problem = f"it has not reported within {late_s:g} s"
            raise CheckpointIncomplete(directory, [FileFault(x, problem) for x in sorted({*names} - {*reports})])
        time.sleep(POLL_INTERVAL_S)


def _report(name: str, data: bytes, directory: Path) -> RankReport:
    report = parse_mapping(data)
    if "error" in report:
        raise CheckpointIncomplete(directory, [FileFault(name, f"could not write its part: {report['error']}")])
    return checked_as(RankReport, report)


@dataclass(frozen=True, kw_only=True)
class ExistingFile:
    """A file of a save that already exists elsewhere.

    Args:
        path: within the new checkpoint.
        source: a file outside; None shares, unread, the file with the same path, and its tensors, of this run's newest
            checkpoint, else of the newest of any run.
        leaves: leaves of `source`, from when it was written: it is never modified, so it is not read, and hard-linked
            if the file system allows. None: its owner may modify it, so it is cloned or copied.
    """

    path: str
    source: Path | None = None
    leaves: tuple[Leaf, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Content and options of one save.

    >>> weights = SavedComponent(tensors={"weight": torch.ones(2)}, files={"config.json": b"{}"})
    >>> SaveRequest(step=100, components={"actor": weights}).step
    100

    Args:
        step: number of training steps done.
        tag: name of the checkpoint, instead of `global_step_N`.
        components: `snapshot.SavedComponent` by directory, such as `actor` or `optimizer`. They hold live tensors and
            are not sent to the writer process.
        existing_files: files that already exist, in an earlier checkpoint or outside.
        state: content of `trainer_state.json`; plain values.
        metrics: metrics of this step, for retention.
        increment: write only files that changed since the newest checkpoint; a path: also share files of the checkpoint
            there.
        multi_writer: this process's part in a save that several processes write.
        num_bytes, images, tensors: memory size of the components, the page-aligned files in it, and the tensors in
            these files; set by `snapshot.lay_out_request`.
    """

    step: int
    tag: str | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    existing_files: Sequence[ExistingFile] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    increment: bool | Path = False
    multi_writer: MultiWriterSave | None = None
    num_bytes: int = 0
    images: tuple[FileImage, ...] = ()
    tensors: tuple[LogicalTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """Outcome of one call to `save`.

    Attributes:
        directory: the published checkpoint; of a participant's part, the staging directory; None if the save failed.
        error: why the save was not published, else None.
        num_bytes: size of the files, of all participants.
        pruned: names of the checkpoints that retention removed.
        prune_error: why retention failed, although the save succeeded.
        stall_s: duration of the call to `save`.
        copied_s: time from the call until the weights might change.
        total_s: time from the call until publication.
        num_deaths: deaths of the writer process during this save.
    """

    step: int
    tag: str | None
    directory: Path | None = None
    error: Exception | None = None
    num_bytes: int = 0
    pruned: tuple[str, ...] = ()
    prune_error: str | None = None
    stall_s: float = 0.0
    copied_s: float = 0.0
    total_s: float = 0.0
    num_deaths: int = 0

    @property
    def name(self) -> str | None:
        """Name of the published checkpoint."""
        return None if self.directory is None else self.directory.name
