"""The data sampler: a seeded permutation per epoch, with a state of three numbers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError

STATE_KEYS = ("seed", "epoch", "position")


@dataclass(frozen=True)
class Mixture:
    """Parts of the data and their shares of an epoch.

    Attributes:
        sizes: number of rows of each part, in the order of the data set.
        weights: relative shares of the samples of an epoch.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def counts(self) -> list[int]:
        """Samples of each part in an epoch, rounded by largest remainder so that they sum to its length."""
        size, total = sum(self.sizes), sum(self.weights)
        exact = [size * weight / total for weight in self.weights]
        counts = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda part: counts[part] - exact[part])
        for part in by_remainder[: size - sum(counts)]:
            counts[part] += 1
        return counts

    def rows_of(self, epoch: int, seed: int) -> Tensor:
        """Row indices of an epoch, [sum(sizes)] int64, part by part."""
        rows, start = [], 0
        for part, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            # The part's permutations form an endless sequence; this epoch begins at position epoch * count of it.
            first, last = epoch * count, (epoch + 1) * count
            passes = range(first // size, -(-last // size))
            orders = [_permutation(size, f"part order {seed} {part} {turn}") for turn in passes]
            if orders:
                offset = first - passes.start * size
                rows.append(start + torch.cat(orders)[offset : offset + count])
            start += size
        return torch.cat(rows)


class DataSampler:
    """Yields batches of row indices without end, in a new permutation per epoch.

    The permutation depends on `(seed, epoch)` only, so `(seed, epoch, position)` is the complete state, and a sampler
    that loads it continues exactly. The global random state is neither used nor changed.

    With `fills` the last batch of an epoch is filled from the next permutation, so that every row is visited once
    per epoch; the same row may then occur twice in that batch. Without, the last `size % batch_size` rows of a
    permutation are left out, other rows in every epoch.

    With a mixture an epoch has as many samples as the data has rows, divided over the parts by their shares. Within a
    part every row is visited once before any is repeated, over epochs.

    Args:
        size: rows of the data set.
        batch_size: rows of a batch.
        seed: of the permutations.
        batch_size_name: name of the setting in messages.
        mixture: parts of the data and their shares; None to visit every row once an epoch.
        source: what the rows are from, for messages.
        fills: see above. A state of an earlier version has False.
    Attributes:
        epoch: of the next batch, from 0.
        position: rows of this epoch returned so far.
    Raises:
        ConfigError: `batch_size` is below 1 or above `size`.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        batch_size_name: str = "batch_size",
        mixture: Mixture | None = None,
        source: str = "the training data",
        fills: bool = False,
    ):
        assert mixture is None or sum(mixture.sizes) == size
        if not 1 <= batch_size <= size:
            raise ConfigError(
                f"{batch_size_name} is {batch_size}: must lie between 1 and the {size} rows of {source}. "
                f"Set {batch_size_name}={size} or less, or add rows."
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.mixture, self.fills = mixture, fills
        self.epoch = self.position = 0
        self._order: tuple[int, int, Tensor] | None = None

    @property
    def batches_per_epoch(self) -> int:
        return self.size // self.batch_size

    def batches_of(self, epochs: int) -> int:
        """Batches in which this many epochs are visited."""
        return -(-epochs * self.size // self.batch_size) if self.fills else epochs * self.batches_per_epoch

    def next_batch(self) -> Tensor:
        """The next row indices, [batch_size] int64. The last batch of an epoch increments `epoch`."""
        batch = self.peek()
        self.epoch, self.position = self._after(self.epoch, self.position + self.batch_size)
        return batch

    def peek(self, ahead: int = 0) -> Tensor:
        """The result of `next_batch` after `ahead` further batches, without advancing."""
        if ahead:
            later = copy.copy(self)
            later.next_batch()
            return later.peek(ahead - 1)
        return self._batch_at(self.epoch, self.position)

    def record(self, prompt_ids: Tensor, passed: Tensor) -> None:
        """Take note of scored responses: the prompt of each and whether it passed, [B]. Here they change nothing."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of what was recorded."""
        return {}

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """`seed`, `epoch` and `position`, and `fills` where it is True."""
        return {key: getattr(self, key) for key in STATE_KEYS} | ({"fills": True} if self.fills else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, including its seed. If the epoch has fewer rows left than a batch, continue with
        the next epoch.

        Raises:
            ConfigError: keys or types are wrong, or the position is outside the data.
        """
        if {*state} - {"fills"} != {*STATE_KEYS} or not all(type(state[key]) is int for key in STATE_KEYS):
            raise ConfigError(f"state is {dict(state)!r}: expected whole numbers for {', '.join(STATE_KEYS)}.")
        if state["epoch"] < 0 or not 0 <= state["position"] <= self.size:
            raise ConfigError(
                f"state is epoch {state['epoch']}, position {state['position']}: the data has {self.size} rows. "
                "Resume with the data that the state was saved with."
            )
        self.seed, epoch, position = (state[key] for key in STATE_KEYS)
        self.fills = bool(state.get("fills"))
        self.epoch, self.position = self._after(epoch, position)

    def rewind(self) -> None:
        """Restart at the first batch of the first epoch."""
        self.epoch = self.position = 0

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        """Epoch and position of the next batch, from the end of the one before."""
        if self.fills:
            return epoch + position // self.size, position % self.size
        return (epoch + 1, 0) if position + self.batch_size > self.size else (epoch, position)

    def _batch_at(self, epoch: int, position: int) -> Tensor:
        rows = self._order_of(epoch)[position : position + self.batch_size]
        remaining = self.batch_size - len(rows)
        return torch.cat([rows, self._order_of(epoch + 1)[:remaining]]) if remaining else rows.clone()

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[:2] != (self.seed, epoch):
            if self.mixture is None:
                order = _permutation(self.size, f"data order {self.seed} {epoch}")
            else:
                rows = self.mixture.rows_of(epoch, self.seed)
                order = rows[_permutation(self.size, f"data order {self.seed} {epoch}")]
            self._order = (self.seed, epoch, order)
        return self._order[2]


def _permutation(size: int, name: str) -> Tensor:
    """A permutation seeded by the hash of a name, so that epoch 1 of seed 0 differs from epoch 0 of seed 1."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
