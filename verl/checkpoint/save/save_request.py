"""The record of one save, what became of it, and the reports of several processes that write one save together.

Nothing here needs torch: the writer process reads it too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
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
LATE_S = 900.0  # a participant of which nothing has come for so long is given up
POLL_INTERVAL_S = 0.005
SIZES_EVERY_S = 5.0  # how often what others have written is measured


@dataclass(frozen=True, kw_only=True)
class MultiWriterSave:
    """A process's place in a save that several of them write; plain values.

    Args:
        directory: the staging directory, which the driver opened.
        name: of this participant; `main` waits for the others and commits.
        others: names of the participants that `main` waits for.
        late_s: how long, while nothing comes of them.
    """

    directory: Path
    name: str
    others: tuple[str, ...] = ()
    late_s: float = LATE_S

    @property
    def commits(self) -> bool:
        """Whether this is the one that publishes."""
        return self.name == "main"


def open_report_directory(disk: FileSystem, directory: Path, nonce: str) -> None:
    """Make the place for reports in a staging directory, and the nonce by which others know that they see it."""
    with write_errors("opening a save for several processes"):
        make_directories(disk, directory / REPORTS, directory)
        write_by_rename(disk, directory / REPORTS / NONCE, nonce.encode())


def sees_nonce(disk: FileSystem, directory: Path, nonce: str) -> bool:
    """Whether this process sees the very directory that the driver opened, and not another of that name."""
    try:
        return disk.read(directory / REPORTS / NONCE, 1024) == nonce.encode()
    except OSError:
        return False


def submit_report(disk: FileSystem, directory: Path, report: RankReport) -> None:
    """Report what was written."""
    with write_errors(f"reporting what {report.name} wrote"):
        write_by_rename(disk, directory / REPORTS / report.name, json.dumps(asdict(report)).encode())


def submit_failure(disk: FileSystem, directory: Path, name: str, error: str) -> None:
    """Report that a participant failed, unless it has reported already or the save was given up."""
    path = directory / REPORTS / name
    with contextlib.suppress(OSError):
        if name not in disk.names(directory / REPORTS):
            write_by_rename(disk, path, json.dumps({"error": error}).encode())


def collect_reports(
    disk: FileSystem, directory: Path, names: Sequence[str], late_s: float = LATE_S
) -> list[RankReport]:
    """Wait for the reports of all participants, which stay where they are until the save is published.

    They are sorted by name, so that equal content gives an equal manifest.

    Args:
        late_s: without a report, and without a byte more in the staging directory.
    Raises:
        CheckpointIncomplete: one of them failed, or is late; names it, and says why.
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


def abandon_missing(disk: FileSystem, directory: Path, names: Collection[str], reason: str) -> None:
    """Let a save end whose participants will not report any more."""
    for name in names:
        submit_failure(disk, directory, name, reason)


def _report(name: str, data: bytes, directory: Path) -> RankReport:
    report = parse_mapping(data)
    if "error" in report:
        raise CheckpointIncomplete(directory, [FileFault(name, f"could not write its part: {report['error']}")])
    return checked_as(RankReport, report)


@dataclass(frozen=True, kw_only=True)
class ExistingFile:
    """A file of a save that exists already.

    Args:
        path: within the new checkpoint.
        source: a file outside; None shares the file of the newest checkpoint, of this run if it has one, under the same
            path, with its tensors and without reading it.
        leaves: digest of `source` from when it was written: it is never modified, is hard-linked if the file system
            allows, and is not read. None: its owner may modify it; it is cloned or copied.
    """

    path: str
    source: Path | None = None
    leaves: tuple[Leaf, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Everything of one save.

    >>> weights = SavedComponent(tensors={"weight": torch.ones(2)}, files={"config.json": b"{}"})
    >>> SaveRequest(step=100, components={"actor": weights}).step
    100

    Args:
        step: training steps done.
        tag: name of the checkpoint, instead of `global_step_N`.
        components: `snapshot.SavedComponent` by directory, such as `actor` or `optimizer`; with live tensors, so
            that the writer process gets a request without them.
        existing_files: files that exist already, in an earlier checkpoint or outside.
        state: for `trainer_state.json`; plain values.
        metrics: at this step, for retention.
        increment: write only files that changed since the newest checkpoint; a path: since that one or the newest.
        multi_writer: this process's part in a save that several processes write.
        num_bytes, images, tensors: size of the memory for the components, the files in it, each from a boundary of
            pages, and the tensors in these; set by `snapshot.lay_out_request`.
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
    """Outcome of one call of `save`.

    Attributes:
        directory: the published checkpoint; of a participant's part, the staging directory; None if the save failed or
            was skipped.
        error: why it was not published, else None.
        was_skipped: no host buffer was free, and `when_busy` is skip.
        num_bytes: of the images, of all participants.
        pruned: names of the checkpoints that retention removed.
        prune_error: why retention failed; the save did not.
        stall_s: duration of the call of `save`.
        copied_s: time from the call until the weights might change.
        total_s: time from the call until publication.
        num_deaths: deaths of the writer process during this save.
    """

    step: int
    tag: str | None
    directory: Path | None = None
    error: Exception | None = None
    was_skipped: bool = False
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
