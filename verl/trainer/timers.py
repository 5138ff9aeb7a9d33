"""Timers of a step's stages, and torch's profiler for a few steps, as a table and a trace in the run directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from verl.component import Description, component
from verl.tracking.base import TrackerSet
from verl.utils.progress import report

_log = logging.getLogger(__name__)


class StageNote:
    """Text that a stage reports."""

    text = ""

    def say(self, text: str) -> None:
        self.text = text


class StageTimers:
    """Times the stages of a step and reports each as it ends: `[gen] 1.24s  384 responses, 1536 tokens`."""

    def __init__(self, tracker: TrackerSet):
        self.tracker = tracker
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[StageNote]:
        """Time the context; several stages of the same name in a step are added."""
        report(name)
        note, start = StageNote(), time.perf_counter()
        yield note
        took = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self.tracker.stage(name, took, note.text)

    def take(self) -> dict[str, float]:
        """The seconds of each stage since the last call, as metrics."""
        taken, self.seconds = self.seconds, {}
        return {f"timing/{name}_s": seconds for name, seconds in taken.items()}


@component
class Profile(Description):
    """Profile some steps of a run with all roles in this process (sharding=none); these steps are slower.

    After the last of the steps, writes `profile/table.txt`, the operators that took most time, and `profile/trace.json`
    for chrome://tracing or ui.perfetto.dev.

    Args:
        first_step: the first step profiled; the first of a run is not typical.
        num_steps: profiled.
        num_rows: of the table.
        memory: record allocations of each operator too.
        shapes: distinguish calls of an operator with different shapes.
    """

    first_step: PositiveInt = 2
    num_steps: PositiveInt = 2
    num_rows: PositiveInt = 40
    memory: bool = False
    shapes: bool = False


class Profiler:
    """A running `Profile`; no effect for None."""

    def __init__(self, settings: Profile | None, run_dir: Path):
        self.settings, self.directory = settings, run_dir / "profile"
        self._running: Any = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        settings = self.settings
        if settings is not None and step == settings.first_step:
            self._start(settings)
        try:
            yield
        except BaseException:
            self.close()
            raise
        if settings is not None and step == settings.first_step + settings.num_steps - 1:
            self.close()

    def _start(self, settings: Profile) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._running = profile(activities=activities, record_shapes=settings.shapes, profile_memory=settings.memory)
        self._running.__enter__()

    def close(self) -> None:
        """Write what was profiled; nothing to do if that was done. A run may end before the last step to profile."""
        running, self._running = self._running, None
        if running is None or self.settings is None:
            return
        running.__exit__(None, None, None)
        import torch

        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        averages = running.key_averages(group_by_input_shape=self.settings.shapes)
        self.directory.mkdir(exist_ok=True)
        table = averages.table(sort_by=by, row_limit=self.settings.num_rows, max_name_column_width=60)
        (self.directory / "table.txt").write_text(table + "\n", "utf-8")
        running.export_chrome_trace(str(self.directory / "trace.json"))
        _log.info("The profile is in %s: table.txt, and trace.json for ui.perfetto.dev.", self.directory)
