"""One leg of `verl resume-check --topology`: saves the state right after loading it, before the first step.

Started by `resume_check.py` only, with the overrides of the training command.
"""

from __future__ import annotations

import os
from pathlib import Path

from verl.cli.resume_check import LOADED_DIR, ROOT
from verl.component import as_plain
from verl.compose.launch import LaunchedRun, entry_point
from verl.compose.validate import validate
from verl.compose.warm_start import resolve_warm_starts
from verl.trainer.train_loop import TrainLoop, fit


def leg(job: LaunchedRun) -> None:
    """Resume from a checkpoint if there is one, save the loaded state, and train."""
    run = validate(job.config, job.faults)
    job.record()
    run = resolve_warm_starts(run, job.console)
    trainer = run.build(job.context)
    try:
        loop = TrainLoop(trainer, as_plain(trainer.description))
        loop.open()
        if trainer.saving.resumed is not None:
            loop.save(directory=Path(os.environ[LOADED_DIR]))
        fit(trainer, loop.config, loop)
    finally:
        trainer.close()


if __name__ == "__main__":
    entry_point(os.environ[ROOT])(leg)()
