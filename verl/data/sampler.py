"""The data sampler: a seeded order per epoch, whose state is three numbers."""

from __future__ import annotations

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
    """Parts of the data, one after another, and how often each is visited.

    Attributes:
        sizes: rows of each part.
        weights: relative shares of an epoch's places.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def counts(self) -> list[int]:
        """Places of each part in an epoch: its share, rounded so that all parts fill the epoch (largest remainder)."""
        size, total = sum(self.sizes), sum(self.weights)
        exact = [size * weight / total for weight in self.weights]
        counts = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda part: counts[part] - exact[part])
        for part in by_remainder[: size - sum(counts)]:
            counts[part] += 1
        return counts

    def rows_of(self, epoch: int, seed: int) -> Tensor:
        """The rows of an epoch, [sum(sizes)] int64, part by part."""
        rows, start = [], 0
        for part, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            # Places epoch * count onward of the endless row of this part's permutations.
            first, last = epoch * count, (epoch + 1) * count
            passes = range(first // size, -(-last // size))
            orders = [_permutation(size, f"part order {seed} {part} {turn}") for turn in passes]
            if orders:
                offset = first - passes.start * size
                rows.append(start + torch.cat(orders)[offset : offset + count])
            start += size
        return torch.cat(rows)


class EpochSampler:
    """Batches of row indices without end, each epoch in an order of its own.

    The order of an epoch follows from `(seed, epoch)` alone, so `(seed, epoch, position)` is the whole state, and a
    sampler that loads it goes on exactly as the saved one would have. No global random state is read or moved.

    A batch never spans two epochs: the last `size % batch_size` rows of an order are left out of that epoch. As every
    epoch has another order, it leaves out other rows.

    With a mixture an epoch has as many places as the data has rows, and each part of the data has its share of them. A
    part goes through its own rows from epoch to epoch, each once before any comes again.

    Args:
        size: rows of the data set.
        batch_size: rows of a batch.
        seed: of the orders.
        batch_size_name: the setting that messages name.
        mixture: the parts of the data and their shares; None visits every row once an epoch.
    Attributes:
        epoch: of the next batch, from 0.
        position: rows of this epoch that were handed out.
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
    ):
        assert mixture is None or sum(mixture.sizes) == size
        if not 1 <= batch_size <= size:
            raise ConfigError(
                f"{batch_size_name} is {batch_size}: must lie between 1 and the {size} rows of the training data, "
                "because a batch never spans two epochs."
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.mixture = mixture
        self.epoch = self.position = 0
        self._order: tuple[int, int, Tensor] | None = None

    @property
    def batches_per_epoch(self) -> int:
        return self.size // self.batch_size

    @property
    def remainder(self) -> int:
        """Rows that each epoch leaves out."""
        return self.size % self.batch_size

    def next_batch(self) -> Tensor:
        """The next row indices, [batch_size] int64. After the last batch of an epoch `epoch` has moved on."""
        batch = self.peek()
        self.position += self.batch_size
        self._move_on()
        return batch

    def peek(self) -> Tensor:
        """What `next_batch` will give."""
        return self._order_of(self.epoch)[self.position : self.position + self.batch_size].clone()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, int]:
        """`seed`, `epoch` and `position`."""
        return {key: getattr(self, key) for key in STATE_KEYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the seed comes with it. Where too few rows of the epoch are left for a batch of
        this size, go on with the next epoch.

        Raises:
            ConfigError: the keys are not those three, or the position lies outside the data.
        """
        if set(state) != set(STATE_KEYS) or not all(type(state[key]) is int for key in STATE_KEYS):
            raise ConfigError(f"state is {dict(state)!r}: expected whole numbers for {', '.join(STATE_KEYS)}.")
        if state["epoch"] < 0 or not 0 <= state["position"] <= self.size:
            raise ConfigError(
                f"state is epoch {state['epoch']}, position {state['position']}: the data has {self.size} rows. "
                "Resume with the data that the state was saved with."
            )
        self.seed, self.epoch, self.position = (state[key] for key in STATE_KEYS)
        self._move_on()

    def rewind(self) -> None:
        """Begin again with the first batch of the first epoch."""
        self.epoch = self.position = 0

    def _move_on(self) -> None:
        if self.position + self.batch_size > self.size:
            self.epoch, self.position = self.epoch + 1, 0

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
    """The order that a name stands for; a hash, so that epoch 1 of seed 0 is not epoch 0 of seed 1."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
