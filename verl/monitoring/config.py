"""The group `trainer.safety`: what a run does when a number is not finite, or leaves its usual range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from verl.component import Description, component
from verl.monitoring.log_prob_gap import LogProbGapLimit

WATCHED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/approx_kl",
    "kl/reference_nats",
    "critic/loss",
    "critic/grad_norm",
    "sft/loss",
    "sft/grad_norm",
    "preference/loss",
    "preference/grad_norm",
)


@component
class Monitoring(Description):
    """The safety of a run. Nothing of it changes a number of a sound run.

    Args:
        on_non_finite: `stop` ends the run with the path of the batch. `skip` continues: a loss or gradient that is not
            finite costs that one optimizer step, a reward, log-prob, value or advantage the whole training step.
        max_skips: consecutive skips of one kind after which the run stops.
        spike_factor: a watched metric spikes when its size is above its running median by more than this factor times
            its usual deviation; null watches none.
        spike_history: steps before the first spike can be reported.
        spike_window: steps that the running median looks back.
        watched: keys of metrics.
        max_dumps: the most batches written to `anomalies/` in a run.
        dump_rows: rows described beside each batch, worst first.
        plant_nan_at: a training step whose updates get a loss of nan, to try all this out; null for none.
        log_prob_gap: what to do where the engine's log-probs are not the trainer's; null does not look.
    """

    on_non_finite: Literal["stop", "skip"] = "stop"
    max_skips: PositiveInt = 3
    spike_factor: PositiveFloat | None = 10.0
    spike_history: Annotated[int, Field(ge=3)] = 20
    spike_window: int = 100
    watched: tuple[str, ...] = WATCHED
    max_dumps: NonNegativeInt = 10
    dump_rows: PositiveInt = 16
    plant_nan_at: PositiveInt | None = None
    log_prob_gap: LogProbGapLimit | None = field(default_factory=LogProbGapLimit)

    def faults(self) -> Iterator[str]:
        if self.spike_window < self.spike_history:
            yield f"spike_window is {self.spike_window}: must be at least spike_history, {self.spike_history}."
