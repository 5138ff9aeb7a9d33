"""The group `replay`: number of rows, tiers, and how rows are sampled. Does not import Arrow.

    t_i = -log(u_i) / w_i,    u_i = uniform(seed, step, number of i)    the smallest t are taken

This samples without replacement with probabilities proportional to the weights. The t of a row depends only on that
row, not on other rows, their order or the number of processes. So a row that cannot be read is replaced by the next
one, and all other sampled rows stay the same.

Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir", in its exponential form.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from verl.component import Description, UnitInterval, component
from verl.ops.sampling import REPLAY, uniform

if TYPE_CHECKING:
    from verl.replay.shard import RowIndex

SamplingStrategy = Literal["uniform", "recency", "advantage"]
LEAST_ADVANTAGE = 1e-3  # relative to the largest: rows without advantage keep a small weight
COMPONENT = "replay_buffer"  # of a checkpoint, and its directory
MIB = 2**20


@dataclass(frozen=True)
class ReplayRequest:
    """A request of a step for old rows.

    Attributes:
        num_rows: the most rows.
        step: seeds the sampling noise, with the run's seed.
        version: current policy version, from which staleness is counted.
        max_staleness: the most policy versions that a row may be behind; None for no limit.
        whole_groups: sample all responses to a prompt or none.
    """

    num_rows: int
    step: int
    version: int
    max_staleness: int | None = None
    whole_groups: bool = False


def weights_of(
    sampling: SamplingStrategy, staleness: np.ndarray, advantage: np.ndarray, half_life: float
) -> np.ndarray:
    """Sampling weights of rows, float64, positive.

    Args:
        sampling: the strategy.
        staleness: policy versions since each row was generated.
        advantage: mean absolute advantage of each row.
        half_life: policy versions that halve the weight under `recency`.
    """
    if sampling == "recency":
        return np.exp2(-staleness.astype(np.float64) / half_life)
    if sampling == "advantage":
        sizes = np.abs(advantage.astype(np.float64))
        return np.maximum(sizes, LEAST_ADVANTAGE * max(float(sizes.max(initial=0.0)), 1e-30))
    return np.ones(len(staleness))


def choose(
    index: RowIndex,
    request: ReplayRequest,
    left_out: np.ndarray,
    sampling: SamplingStrategy,
    half_life: float,
    seed: int,
) -> np.ndarray:
    """Numbers of the sampled rows, ascending.

    Args:
        index: of all rows.
        left_out: rows that cannot be sampled now, [len(index)].
        sampling, half_life: see `weights_of`.
        seed: of the run.
    """
    staleness = request.version - index["policy_version"].astype(np.int64)
    fits = index["is_there"] & ~left_out
    if request.max_staleness is not None:
        fits &= staleness <= request.max_staleness
    numbers, sizes = np.arange(index.first, index.end), np.ones(len(index), dtype=np.int64)
    heads, advantage = np.arange(len(index)), np.abs(index["advantage"])
    if request.whole_groups and len(index):
        groups = index["group"]
        heads = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
        sizes = np.diff(heads, append=len(index))
        fits, staleness = np.logical_and.reduceat(fits, heads), np.maximum.reduceat(staleness, heads)
        advantage, numbers = np.add.reduceat(advantage, heads) / sizes, groups[heads]
    (able,) = np.nonzero(fits)
    weights = weights_of(sampling, staleness[able], advantage[able], half_life)
    taken = able[draw(numbers[able], weights, sizes[able], request.num_rows, seed, request.step)]
    spans = [np.arange(first, first + size) for first, size in zip(heads[taken].tolist(), sizes[taken].tolist())]
    return index.first + np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


def draw(numbers: np.ndarray, weights: np.ndarray, sizes: np.ndarray, most: int, seed: int, step: int) -> np.ndarray:
    """Sample items without replacement, in order of t_i (see the module), until the next item does not fit.

    Args:
        numbers: int64, numbers of rows or groups, which seed their noise.
        weights: positive.
        sizes: rows of each item.
        most: rows in all.
        seed, step: of the noise.
    Returns:
        Indices into `numbers`, ascending.
    """
    noise = uniform(seed, step, torch.from_numpy(numbers), torch.zeros(1, dtype=torch.int64), 0, REPLAY).numpy()
    with np.errstate(divide="ignore"):
        times = -np.log(noise) / weights
    enough = min(len(times), most)  # each has at least one row
    first = np.argpartition(times, enough - 1)[:enough] if 0 < enough < len(times) else np.arange(len(times))
    order = first[np.lexsort((numbers[first], times[first]))]
    return np.sort(order[np.cumsum(sizes[order]) <= most])


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
