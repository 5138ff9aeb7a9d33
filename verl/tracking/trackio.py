"""Metrics to Trackio: a local database for `trackio show`, or a Space of Hugging Face."""

from __future__ import annotations

import contextlib
import importlib
import io
import secrets
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from verl.component import BuildContext, component
from verl.tracking.base import ContinuedTracker, TrackerDescription


@component
class Trackio(TrackerDescription):
    """Logs to a Trackio run, in TRACKIO_DIR or, if that is not set, in the cache of Hugging Face.

    A resumed run continues the run of its parent. Trackio's own thread writes; its records of CPU and GPU are off.

    Args:
        project: Trackio project.
        space_id: a Space of Hugging Face, `user/name`, to log to over the network; null for this machine.
    """

    package: ClassVar[str] = "trackio"

    project: Annotated[str, Field(min_length=1)] = "verl"
    space_id: str | None = None

    def build(self, context: BuildContext) -> TrackioTracker:
        return TrackioTracker(self)


class TrackioTracker(ContinuedTracker):
    """A Trackio run. Its name gets a suffix, since Trackio continues runs by name."""

    def __init__(self, settings: Trackio):
        self._settings = settings
        self._run: Any = None

    def identity(self) -> dict[str, Any]:
        return {} if self._run is None else {"project": self._run.project, "name": self._run.name}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._trackio = trackio = importlib.import_module("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # how to start its dashboard
            self._run = trackio.init(
                project=self.former.get("project", self._settings.project),
                name=self.former.get("name", f"{run_name}-{secrets.token_hex(4)}"),
                space_id=self._settings.space_id,
                config={key: value for key, value in config.items() if not key.startswith("_")},  # others are refused
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        cells = [{key: x if isinstance(x, (str, int, float)) else str(x) for key, x in row.items()} for row in rows]
        self._run.log({f"samples/{name}": self._trackio.Table(data=cells)}, step=step)

    def close(self, status: str) -> None:
        if self._run is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()
            current = self._trackio.context_vars.current_run
            if current.get() is self._run:  # else it is finished again when the process ends
                current.set(None)
