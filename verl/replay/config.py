"""The group `replay`: how many rows are kept, where, and which of them are sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from verl.component import Description, component
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

    max_rows: int = 100_000
    hot_share: float = 0.1
    warm_share: float = 0.8
    cold_share: float = 0.1
    memory_mib: int = 1024
    shard_mib: int = 64
    sampling: SamplingStrategy = "uniform"
    recency_half_life: float = 4.0
    buffer_warmup_steps: int = 0
    fetch_timeout_s: float = 30.0
    fetch_retry_s: float = 60.0
    directory: str | None = None

    def faults(self) -> Iterator[str]:
        for name in ("max_rows", "memory_mib", "shard_mib"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}: must be at least 1."
        shares = {name: getattr(self, name) for name in ("hot_share", "warm_share", "cold_share")}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                yield f"{name} is {share}: must lie in [0, 1]."
        if abs(sum(shares.values()) - 1) > 1e-6:
            told = ", ".join(f"{share:g}" for share in shares.values())
            yield f"hot_share is {self.hot_share:g}: with the others it makes {told}, which must sum to 1."
        if 8 * self.shard_mib > max(self.memory_mib, 8):
            yield (
                f"shard_mib is {self.shard_mib}: a file is made in memory, which may hold memory_mib "
                f"{self.memory_mib} in all. Set shard_mib to at most {max(1, self.memory_mib // 8)}."
            )
        for name in ("recency_half_life", "fetch_timeout_s", "fetch_retry_s"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"{name} is {getattr(self, name)}: must be a finite number above 0."
        if self.buffer_warmup_steps < 0:
            yield f"buffer_warmup_steps is {self.buffer_warmup_steps}: must not be negative."
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
