"""The group `replay`: how many rows are kept, where, and which of them are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from verl.component import Description, UnitInterval, component
from verl.replay.sampling import SamplingStrategy

MIB = 2**20


@component
class TieredReplay(Description):
    """Settings of `replay=tiered`: the newest rows in device memory, most on the local disk, the oldest in `storage`.

    Args:
        max_rows: rows kept; the oldest leave.
        hot_share, warm_share, cold_share: of these rows, the newest in device memory, those in files on the local disk,
            and the oldest in the object storage; together 1. Without an object storage the oldest stay on the disk.
        memory_mib: that the buffer may take: at most a quarter of it for the hot layer, a quarter for rows on their way
            to the disk, an eighth for the file being made of them, and an eighth for pages of files.
        shard_mib: of rows that make a file, at most an eighth of `memory_mib`.
        sampling: which rows a step is likely to take: all alike, newer ones, or those of large advantage.
        recency_half_life: policy versions that halve the chance of a row under `recency`.
        buffer_warmup_steps: steps that only fill the buffer, from its beginning on, before any takes rows from it.
        fetch_timeout_s: how long a step waits for rows from the object storage before it takes others.
        fetch_retry_s: how long the storage is left alone after it did not answer.
        directory: below which each run has one for its files, linked to as `replay` in the run's own; null keeps them
            there. On the file system of the checkpoints these share its bytes.
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
                f"shard_mib is {self.shard_mib}: a file is made in memory, which may hold memory_mib "
                f"{self.memory_mib} in all. Set shard_mib to at most {max(1, self.memory_mib // 8)}."
            )
        if self.directory is not None and Path(self.directory).exists() and not Path(self.directory).is_dir():
            yield f"directory is {self.directory!r}: it is no directory."

    @property
    def hot_rows(self) -> int:
        """Rows of the hot layer, at most."""
        return round(self.hot_share * self.max_rows)

    @property
    def near_rows(self) -> int:
        """Rows of the hot and of the warm layer."""
        return round((self.hot_share + self.warm_share) * self.max_rows)
