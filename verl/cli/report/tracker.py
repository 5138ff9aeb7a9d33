"""Tracker that writes `report.html` to the run directory when the run ends, also after an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.cli.report.page import report
from verl.component import BuildContext, component
from verl.tracking.base import Tracker, TrackerDescription
from verl.tracking.console import PAGE
from verl.utils.external_input import write_whole


@component
class Report(TrackerDescription):
    """Writes `report.html`, the page of `verl report`, from the files of the tracker `jsonl`."""

    def build(self, context: BuildContext) -> ReportTracker:
        return ReportTracker()


class ReportTracker(Tracker):
    """Reads the run directory in `close`, when the other trackers of this package are closed."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._run_dir = run_dir

    def close(self, status: str) -> None:
        """Write the page.

        Raises:
            OSError: the file cannot be written.
        """
        if self._run_dir is not None and (self._run_dir / "metrics.jsonl").is_file():
            write_whole(self._run_dir / PAGE, report([self._run_dir], status).encode())
