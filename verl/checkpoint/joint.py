"""A save that several processes write: where their reports lie, who waits for them, and what becomes of late ones.

driver      staging/<id>/ opened, with a nonce ──> writes what is its own ──> waits for reports ──> commits
rank 0..n   sees the nonce? ──> writes its files below staging/<id>/ ──> report

A report is a file below the staging directory, so that it arrives whatever way processes were started, and while they
train on. The directory of reports is taken away before the commit, which refuses files that nobody reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import verl
from verl.checkpoint.disk import Disk
from verl.checkpoint.files import files_below, make_directories, remove_tree, write_by_rename, write_errors
from verl.checkpoint.manifest import Manifest
from verl.checkpoint.participant import PartReport
from verl.errors import CheckpointIncomplete, FileFault

log = logging.getLogger(__name__)

DESK, NONCE = "reports", "nonce"
REPORT_LIMIT_BYTES = 2**28
LATE_S = 900.0  # a participant of which nothing has come for so long is given up
LOOK_EVERY_S = 0.005
SIZES_EVERY_S = 5.0  # how often what others have written is measured


@dataclass(frozen=True, kw_only=True)
class Joint:
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


def open_desk(disk: Disk, directory: Path, nonce: str) -> None:
    """Make the place for reports in a staging directory, and the nonce by which others know that they see it."""
    with write_errors("opening a save for several processes"):
        make_directories(disk, directory / DESK, directory)
        write_by_rename(disk, directory / DESK / NONCE, nonce.encode())


def sees(disk: Disk, directory: Path, nonce: str) -> bool:
    """Whether this process sees the very directory that the driver opened, and not another of that name."""
    try:
        return disk.read(directory / DESK / NONCE, 1024) == nonce.encode()
    except OSError:
        return False


def hand_in(disk: Disk, directory: Path, report: PartReport) -> None:
    """Report what was written."""
    wrapped = Manifest(
        sequence=0, step=0, tag=None, run_id=report.name, saved_at="", verl_version=verl.__version__,
        files=report.files, tensors=report.tensors, deltas=report.deltas,
    )  # fmt: skip
    text = json.dumps({"shared": report.shared, "manifest": wrapped.to_bytes().decode()})
    with write_errors(f"reporting what {report.name} wrote"):
        write_by_rename(disk, directory / DESK / report.name, text.encode())


def hand_in_failure(disk: Disk, directory: Path, name: str, error: str) -> None:
    """Report that a participant failed, unless it has reported already or the save was given up."""
    path = directory / DESK / name
    with contextlib.suppress(OSError):
        if name not in disk.names(directory / DESK):
            write_by_rename(disk, path, json.dumps({"error": error}).encode())


def collect(disk: Disk, directory: Path, names: Sequence[str], late_s: float = LATE_S) -> list[PartReport]:
    """Wait for the reports of all participants, and take away where they lay.

    They come in the order of the names, whoever was first: the same content is then the same manifest.

    Args:
        late_s: without a report, and without a byte more in the staging directory.
    Raises:
        CheckpointIncomplete: one of them failed, or is late; names it, and says why.
    """
    missing: set[str] = set(names)
    reports: dict[str, PartReport] = {}
    waiting = _Waiting(disk, directory)
    while True:
        with write_errors("looking for reports"):
            arrived = [name for name in disk.names(directory / DESK) if name in missing]
            for name in arrived:
                reports[name] = _report(name, disk.read(directory / DESK / name, REPORT_LIMIT_BYTES), directory)
                missing.remove(name)
                waiting.restart()
            if not missing:
                remove_tree(disk, directory / DESK)
                return [reports[name] for name in names]
            idle_s = waiting.idle_s()
        if idle_s > late_s:
            late = [FileFault(name, f"it has not reported within {late_s:g} s") for name in sorted(missing)]
            raise CheckpointIncomplete(directory, late)
        time.sleep(LOOK_EVERY_S)


class _Waiting:
    """How long nothing has come of a save that others write; while this process was stopped does not count."""

    def __init__(self, disk: Disk, directory: Path):
        self._disk, self._directory = disk, directory
        self._sizes: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        self._idle_s = self._unseen_s = 0.0
        self._looked_at = time.monotonic()

    def idle_s(self) -> float:
        """Seconds; asked for again and again, it looks at the files now and then."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at, SIZES_EVERY_S)
        self._looked_at, self._idle_s, self._unseen_s = now, self._idle_s + passed_s, self._unseen_s + passed_s
        if self._unseen_s >= SIZES_EVERY_S:
            self._unseen_s = 0.0
            sizes = files_below(self._disk, self._directory)[0]
            if sizes != self._sizes:
                self._sizes, self._idle_s = sizes, 0.0
        return self._idle_s


def give_up_missing(disk: Disk, directory: Path, names: Collection[str], reason: str) -> None:
    """Let a save end whose participants will not report any more."""
    for name in names:
        hand_in_failure(disk, directory, name, reason)


def _report(name: str, data: bytes, directory: Path) -> PartReport:
    told = json.loads(data)
    if "error" in told:
        raise CheckpointIncomplete(directory, [FileFault(name, f"could not write its part: {told['error']}")])
    wrapped = Manifest.from_bytes(told["manifest"].encode())
    return PartReport(name, wrapped.files, wrapped.tensors, tuple(told["shared"]), wrapped.deltas)
