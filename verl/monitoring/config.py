"""The group `trainer.safety`: what a run does when a number is not finite, or leaves its usual range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

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
)


@component
class Monitoring(Description):
    """The safety of a run. Nothing of it changes a number of a sound run.

    Args:
        on_non_finite: `stop` ends the run with the path of the batch. `skip` goes on: a loss or gradient that is not
            finite costs that one optimizer step, a reward, log-prob, value or advantage the whole training step.
        max_skips: so many skips in a row of the same kind, and the run stops after all.
        spike_factor: a watched metric spikes when its size is above its running median by more than this factor times
            its usual deviation; null watches none.
        spike_history: steps before the first spike can be told.
        spike_window: steps that the running median looks back.
        watched: keys of metrics.
        max_dumps: batches written to `anomalies/` in one run.
        dump_rows: rows described beside each batch, worst first.
        plant_nan_at: a training step whose updates get a loss of nan, to try all this out; null for none.
        log_prob_gap: what to do where the engine's log-probs are not the trainer's; null does not look.
    """

    on_non_finite: Literal["stop", "skip"] = "stop"
    max_skips: int = 3
    spike_factor: float | None = 10.0
    spike_history: int = 20
    spike_window: int = 100
    watched: tuple[str, ...] = WATCHED
    max_dumps: int = 10
    dump_rows: int = 16
    plant_nan_at: int | None = None
    log_prob_gap: LogProbGapLimit | None = field(default_factory=LogProbGapLimit)

    def faults(self) -> Iterator[str]:
        for name, least in (("max_skips", 1), ("spike_history", 3), ("max_dumps", 0), ("dump_rows", 1)):
            if getattr(self, name) < least:
                yield f"{name} is {getattr(self, name)}: must be at least {least}."
        if self.spike_window < self.spike_history:
            yield f"spike_window is {self.spike_window}: must be at least spike_history, {self.spike_history}."
        if self.spike_factor is not None and not 0 < self.spike_factor < float("inf"):
            yield f"spike_factor is {self.spike_factor}: must be a finite number above 0, or null."
        if self.plant_nan_at is not None and self.plant_nan_at < 1:
            yield f"plant_nan_at is {self.plant_nan_at}: must be at least 1, or null."
