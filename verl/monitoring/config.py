"""The group `trainer.safety`: what a run does when a number is not finite, or log-probs differ."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from verl.component import Description, component
from verl.monitoring.log_prob_gap import LogProbGapLimit


@component
class Monitoring(Description):
    """The safety of a run. Nothing of it changes a number of a sound run.

    Args:
        on_non_finite: `stop` ends the run with the path of the batch. `skip` continues after a loss or gradient that is
            not finite, which costs that one optimizer step; other numbers that are not finite stop the run.
        max_skips: consecutive skips of one role after which the run stops.
        max_dumps: the most batches written to `anomalies/` in a run.
        plant_nan_at: a training step whose updates get a loss of nan, to try all this out; null for none.
        log_prob_gap: what to do where the engine's log-probs are not the trainer's; null does not look.
    """

    on_non_finite: Literal["stop", "skip"] = "stop"
    max_skips: PositiveInt = 3
    max_dumps: NonNegativeInt = 10
    plant_nan_at: PositiveInt | None = None
    log_prob_gap: LogProbGapLimit | None = field(default_factory=LogProbGapLimit)
