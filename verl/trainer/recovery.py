"""A run that loses a worker goes on by itself: from its last checkpoint, with new workers, a bounded number of times.

fit ──> WorkerDied ──> the last checkpoint of this run ──> the trainer is built anew, resuming from it ──> fit
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.errors import CheckpointNotFound, WorkerDied
from verl.trainer.loop import Result
from verl.trainer.saving import Saving

_log = logging.getLogger(__name__)


class Restartable(Protocol):
    """What a recovery needs of a trainer.

    Attributes:
        restarts: why it was restarted, once for each time.
    """

    description: Any
    saving: Saving
    restarts: list[str]

    def restart(self, resume: str | None, why: str) -> None: ...


def fit_through_losses(trainer: Restartable, fit: Callable[[], Result], max_restarts: int) -> Result:
    """Train to the end, whatever workers are lost.

    Raises:
        WorkerDied: a worker was lost, and the run keeps no checkpoints or was restarted as often as it may be.
    """
    resume, why = None, None
    while True:
        try:
            if why is not None:
                trainer.restart(resume, why)  # may lose a worker too
            return fit()
        except WorkerDied as error:
            if not max_restarts:
                raise
            if (reason := _hopeless(trainer, max_restarts)) is not None:
                raise type(error)(error.rank, error.call, error.step, f"{error.detail}\n{reason}") from error
            why = str(error).splitlines()[0].rstrip(":")
            resume = _last_of(trainer.saving) or trainer.description.resume
            where = "the beginning, for it had saved nothing yet" if resume is None else resume
            number = len(trainer.restarts) + 1
            _log.warning("Restart %d of at most %d, from %s: %s", number, max_restarts, where, why)


def _hopeless(trainer: Restartable, max_restarts: int) -> str | None:
    """Why the run cannot go on by itself."""
    if trainer.saving.settings is None:
        return "The run keeps no checkpoints, so it cannot go on by itself. Set checkpoint=async."
    if len(trainer.restarts) >= max_restarts:
        return f"The run was restarted {max_restarts} times before, and trainer.placement.max_restarts allows no more."
    return None


def _last_of(saving: Saving) -> str | None:
    """The checkpoint that this run published last; another run's in the same directory is none of its own."""
    try:
        complete = CheckpointDirectory(saving.directory).complete()
    except CheckpointNotFound:
        return None
    own = [published for published in complete if published.manifest.run_id == saving.run_id]
    return str(own[-1].directory) if own else None
