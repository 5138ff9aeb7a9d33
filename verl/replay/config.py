"""The group `replay`: number of rows, tiers, and sampling. Does not import Arrow."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from verl.component import Description, UnitInterval, component
from verl.replay.sampling import SamplingStrategy

COMPONENT = "replay_buffer"  # of a checkpoint, and its directory
MIB = 2**20


@component
class TieredReplay(Description):
    """Settings of `replay=tiered`: the newest rows in device memory, most on the local disk, the oldest in `storage`.

    Args:
        max_rows: capacity; the oldest rows are dropped.
        hot_share, warm_share, cold_share: fractions of the rows, newest first, in device memory, on the local disk and
            in object storage; they sum to 1. Without object storage the oldest rows stay on the disk.
        memory_mib: memory limit of the buffer: at most a quarter each for the hot tier, for rows that wait to be
            written and for the two shards that may be written at a time, and an eighth for the mapped pages of a file.
        shard_mib: size of a shard file, at most an eighth of `memory_mib`.
        sampling: `uniform`, `recency` (newer rows are likelier) or `advantage` (rows of large advantage are).
        recency_half_life: policy versions that halve the weight of a row under `recency`.
        buffer_warmup_steps: number of first steps that only fill the buffer.
        fetch_timeout_s: how long a step waits for rows from object storage before it uses others.
        fetch_retry_s: pause after a failed request to object storage.
        directory: parent of the directories for buffer files, one per run, linked as `replay` in the run directory;
            null for the run directory itself. On the file system of the checkpoints, files are shared by hard links.
    Raises:
        ConfigError: a number outside its range.
    """

    max_rows: PositiveInt = 100_000
    hot_share: UnitInterval = 0.1
    warm_share: UnitInterval = 0.8
    cold_share: UnitInterval = 0.1
    memory_mib: PositiveInt = 1024
    shard_mib: PositiveInt = 64
    sampling: SamplingStrategy = "uniform"
    recency_half_life: PositiveFloat = 4.0
    buffer_warmup_steps: NonNegativeInt = 0
    fetch_timeout_s: PositiveFloat = 30.0
    fetch_retry_s: PositiveFloat = 60.0
    directory: str | None = None

    def faults(self) -> Iterator[str]:
        shares = (self.hot_share, self.warm_share, self.cold_share)
        if abs(sum(shares) - 1) > 1e-6:
            sums = ", ".join(f"{share:g}" for share in shares)
            yield f"hot_share is {self.hot_share:g}: with the others it makes {sums}, which must sum to 1."
        if 8 * self.shard_mib > max(self.memory_mib, 8):
            yield (
                f"shard_mib is {self.shard_mib}: shards are built in memory, which memory_mib limits to "
                f"{self.memory_mib} in all. Set shard_mib to at most {max(1, self.memory_mib // 8)}."
            )
        if self.directory is not None and Path(self.directory).exists() and not Path(self.directory).is_dir():
            yield f"directory is {self.directory!r}: it is not a directory."

    @property
    def hot_rows(self) -> int:
        """Capacity of the hot tier in rows."""
        return round(self.hot_share * self.max_rows)

    @property
    def near_rows(self) -> int:
        """Capacity of the hot and the warm tier in rows."""
        return round((self.hot_share + self.warm_share) * self.max_rows)

    def directory_of(self, run_dir: Path) -> Path:
        """The directory of a run's buffer files. Below `directory` it is unique to the run, and the run directory has
        a link to it.
        """
        in_run = run_dir / "replay"
        if self.directory is None:
            return in_run
        digest = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=6).hexdigest()
        directory = Path(self.directory).resolve() / f"{run_dir.name}-{digest}"
        if in_run.is_symlink():
            in_run.unlink()
        if not in_run.exists():
            run_dir.mkdir(parents=True, exist_ok=True)
            in_run.symlink_to(directory)
        return directory
