"""The end of a multirun: a table of its jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepTable(Callback):
    """Hydra callback that prints and saves the table of a sweep after its last job, with any launcher."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from verl.tracking.sweep_table import outcomes, show, write

        directory = Path(config.hydra.sweep.dir)
        if not directory.is_dir() or not (jobs := outcomes(directory)):
            return
        show(jobs, f"Sweep of {len(jobs)} job{'s' if len(jobs) > 1 else ''}")
        print(write(directory, jobs))  # noqa: T201 - output of the command
