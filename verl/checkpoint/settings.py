"""When checkpoints are saved, where, how, and which of them are kept: the group `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.retention import Retention
from verl.description import Description


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Description):
    """Settings of `checkpoint=async` and `checkpoint=sync`.

    A checkpoint is also saved after the last step, at SIGTERM and Ctrl-C once the step under way is done, and before
    `time_limit_s`.

    Args:
        save_dir: null is `checkpoints/<project>/<experiment>`, the same for every start of an experiment, so that
            `resume=latest` finds what an earlier one left.
        save_interval: steps between saves; null for none by steps.
        save_interval_s: seconds between saves, at the next step boundary; null for none by time.
        save_best: a metric of evaluations; each new best is saved. See `best_mode`.
        keep_last_n: newest checkpoints to keep; null keeps all.
        keep_best: a metric; the checkpoint where it was best is kept too.
        best_mode: whether more or less is better.
        keep_every: checkpoints of steps that this number divides are kept too.
        save_async: write in a process of its own while training goes on; false stops training while it writes.
        when_busy: with two saves under way, wait for one of them, or skip the new one and say so.
        use_safetensors: false writes the weights as `pytorch_model.bin` for tools that need it.
        max_shard_gib: size of a file of weights.
        time_limit_s: seconds that the job may run, such as a queue's limit; the run saves and ends before. null: none.
        time_margin_s: kept free before the limit, beside the time of a step.
        save_frozen: keep the weights of reference and reward model in the checkpoints too: copied once, then hard
            links. Otherwise only their names and digests are kept.
        verify: hash what is read when a run is resumed.
        strict: a damaged checkpoint stops `resume=latest`, instead of being passed over with a loud line.
        incremental_save, incremental_base, cold_storage: not in this version; each must stay as it is.
    """

    save_dir: str | None = None
    save_interval: int | None = 100
    save_interval_s: float | None = None
    save_best: str | None = None
    keep_last_n: int | None = 3
    keep_best: str | None = None
    best_mode: Literal["max", "min"] = "max"
    keep_every: int | None = None
    save_async: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    use_safetensors: bool = True
    max_shard_gib: float = 4.0
    time_limit_s: float | None = None
    time_margin_s: float = 120.0
    save_frozen: bool = False
    verify: bool = True
    strict: bool = False
    incremental_save: bool = False
    incremental_base: str | None = None
    cold_storage: dict[str, Any] | None = None

    def faults(self) -> Iterator[str]:
        for name in ("save_interval", "save_interval_s", "keep_last_n", "keep_every", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{name} is {value}: must be above 0, or null for none."
        if self.max_shard_gib <= 0:
            yield f"max_shard_gib is {self.max_shard_gib}: must be above 0."
        if self.time_margin_s < 0:
            yield f"time_margin_s is {self.time_margin_s}: must not be negative."
        if self.save_dir is not None and Path(self.save_dir).exists() and not Path(self.save_dir).is_dir():
            yield f"save_dir is {self.save_dir!r}: it is no directory."
        for name in ("incremental_save", "incremental_base", "cold_storage"):
            if value := getattr(self, name):
                yield f"{name} is {value!r}: this version saves whole checkpoints to a local directory. Leave it out."

    def directory(self, project: str, experiment: str, job: str = "") -> Path:
        """Where this run saves.

        Args:
            job: of a sweep, so that its jobs do not share a directory.
        """
        stable = Path(self.save_dir) if self.save_dir is not None else Path("checkpoints") / project / experiment
        return (stable / job if job else stable).absolute()

    @property
    def retention(self) -> Retention:
        """Which checkpoints outlive a save."""
        best = self.keep_best or self.save_best
        return Retention(
            keep_last_n=self.keep_last_n, keep_best=best, best_mode=self.best_mode, keep_every=self.keep_every
        )
