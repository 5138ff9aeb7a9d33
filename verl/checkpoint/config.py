"""The group `checkpoint`: when checkpoints are saved, where, how, and which of them are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.retention import Retention
from verl.component import Description, component
from verl.errors import ConfigError
from verl.storage.config import storage_from


@component
class Checkpointing(Description):
    """Settings of `checkpoint=async`, `checkpoint=sync` and `checkpoint=incremental`.

    A checkpoint is also saved after the last step, after the current step at SIGTERM and Ctrl-C, and before
    `time_limit_s`.

    Args:
        save_dir: null: `checkpoints/<project>/<experiment>`, the same for every start of a training, so that
            `resume=latest` finds earlier checkpoints. A run is refused if it holds another training's checkpoints.
        save_interval: steps between saves; null for none by steps.
        save_interval_s: seconds between saves, at the next step boundary; null for none by time.
        save_best: a metric of evaluations; each new best is saved. See `best_mode`.
        keep_last_n: newest checkpoints to keep; null keeps all.
        keep_best: a metric; the checkpoint where it was best is kept too.
        best_mode: whether more or less is better.
        keep_every: checkpoints whose step is a multiple of this are kept too.
        save_async: write in a separate process while training continues; false: training waits for each save.
        use_safetensors: false writes the weights as `pytorch_model.bin` for tools that need it.
        max_shard_gib: size of a file of weights.
        time_limit_s: seconds that the job may run, such as a queue's limit; the run saves and ends before. null: none.
        time_margin_s: safety margin before the limit, in addition to the time of a step.
        save_frozen: keep the weights of reference and reward model in the checkpoints too: copied once, then hard
            links. Otherwise only their names and digests are kept.
        verify: hash what is read when a run is resumed.
        strict: `resume=latest` fails on a damaged checkpoint, instead of skipping it with a warning.
        incremental_save: write only files that changed; an unchanged one becomes a hard link to that of an earlier
            checkpoint. See docs/checkpoints.md.
        incremental_base: a checkpoint on the same file system whose unchanged files are linked too; null: the newest
            one alone.
        cold_storage: object storage that checkpoints are uploaded to in the background, such as
            `{type: s3, bucket: models, prefix: runs}`: keys of the group `storage`, `upload_interval` in seconds
            (`upload_interval_s` here) and `upload_every` (`upload_interval` here). null is what `storage=` names, if
            anything.
        upload_interval: upload every n-th checkpoint, each with a tag, and the last one of the run; null: none.
        upload_interval_s: of those, at most one per this many seconds (the newest); checkpoints with a tag and the last
            one of the run are always uploaded. null: all of them.
        keep_waiting: maximum number of checkpoints kept on the local disk, beyond the retention rules, only because
            they are not yet uploaded.
        upload_wait_s: at the end of the run, wait at most this long for uploads.
        writer_timeout_s: largest time without progress of the writer process, after which it is killed and restarted
            and writes the save again; the total time of a save has no limit.
    """

    save_dir: str | None = None
    save_interval: PositiveInt | None = 100
    save_interval_s: PositiveFloat | None = None
    save_best: str | None = None
    keep_last_n: PositiveInt | None = 3
    keep_best: str | None = None
    best_mode: Literal["max", "min"] = "max"
    keep_every: PositiveInt | None = None
    save_async: bool = True
    use_safetensors: bool = True
    max_shard_gib: PositiveFloat = 4.0
    time_limit_s: PositiveFloat | None = None
    time_margin_s: NonNegativeFloat = 120.0
    save_frozen: bool = False
    verify: bool = True
    strict: bool = False
    incremental_save: bool = False
    incremental_base: str | None = None
    cold_storage: dict[str, Any] | None = None
    upload_interval: PositiveInt | None = 1
    upload_interval_s: PositiveFloat | None = None
    keep_waiting: NonNegativeInt = 8
    upload_wait_s: NonNegativeFloat = 600.0
    writer_timeout_s: PositiveFloat = 600.0

    def faults(self) -> Iterator[str]:
        path = Path(self.save_dir or ".").expanduser()
        if path.exists() and not path.is_dir():
            yield f"save_dir is {self.save_dir!r}: it is not a directory."
        yield from self._cold_faults()
        yield from self._incremental_faults()

    def _incremental_faults(self) -> Iterator[str]:
        if self.incremental_base is None:
            return
        if not self.incremental_save:
            yield (
                f"incremental_base is {self.incremental_base!r}, but incremental_save is false, so it has no "
                "effect. Set checkpoint=incremental, or leave incremental_base out."
            )
        if not (Path(self.incremental_base) / MANIFEST).is_file():
            yield f"incremental_base is {self.incremental_base!r}: no checkpoint, it has no {MANIFEST}. Give one."

    def _cold_faults(self) -> Iterator[str]:
        if self.cold_storage is None:
            return
        settings = dict(self.cold_storage)
        seconds, count = settings.pop("upload_interval", None), settings.pop("upload_every", 1)
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            yield (
                f"cold_storage.upload_interval is {seconds!r}: seconds between uploads, above 0; for every n-th "
                "checkpoint set upload_every."
            )
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            yield f"cold_storage.upload_every is {count!r}: every how many checkpoints, at least 1."
        try:
            storage_from(settings)
        except ConfigError as error:
            yield from (f"cold_storage.{fault}" for fault in error.faults)

    def directory(self, project: str, experiment: str, job: str = "") -> Path:
        """The directory of this run; see `verl.trainer.state.save_directory`.

        Args:
            job: name of a sweep's job, so that jobs with different settings do not share a directory.
        """
        own = self.save_dir
        stable = Path("checkpoints") / project / experiment if own is None else Path(own).expanduser()
        return (stable / job if job else stable).absolute()

    @property
    def increment(self) -> bool | Path:
        """`SaveRequest.increment` of every save."""
        has_base = self.incremental_save and self.incremental_base is not None
        return Path(str(self.incremental_base)).absolute() if has_base else self.incremental_save

    @property
    def retention(self) -> Retention:
        best = self.keep_best or self.save_best
        return Retention(
            keep_last_n=self.keep_last_n, keep_best=best, best_mode=self.best_mode, keep_every=self.keep_every
        )
