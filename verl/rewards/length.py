"""Rewards of the length of a response, in tokens as the policy chose them, its end-of-sequence token included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.rewards.base import Rating, Reward, RewardDescription


@dataclass(frozen=True, kw_only=True)
class Length(RewardDescription, Reward):
    """`inside` where a response has min_tokens to max_tokens tokens, both included, and `outside` elsewhere.

    Args:
        max_tokens: None for no upper bound.
    """

    min_tokens: int = 1
    max_tokens: int | None = None
    inside: float = 0.0
    outside: float = -1.0

    def faults(self) -> Iterator[str]:
        if self.min_tokens < 0:
            yield f"min_tokens is {self.min_tokens}: must not be negative."
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            yield f"max_tokens is {self.max_tokens}: must be at least min_tokens, which is {self.min_tokens}."
        for name in ("inside", "outside"):
            if not math.isfinite(getattr(self, name)):
                yield f"{name} is {getattr(self, name)}: must be finite."

    @property
    def producer(self) -> Callable:
        return self.rate_batch

    def rate_batch(self, batch: DataProto) -> Rating:
        """`inside` or `outside` for each response; needs no texts."""
        lengths = response_lengths(batch)
        fits = (lengths >= self.min_tokens) & (lengths <= (np.inf if self.max_tokens is None else self.max_tokens))
        return Rating(np.where(fits, self.inside, self.outside))


@dataclass(frozen=True, kw_only=True)
class Overlong(RewardDescription, Reward):
    """Soft overlong punishment: nothing up to a buffer before the limit, then linearly down to -penalty at the limit.

                   0                                            |y| <= L_max - L_cache
        R(y) =     penalty * ((L_max - L_cache) - |y|) / L_cache   below L_max
                   -penalty                                     L_max < |y|

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13, where penalty is 1.
    Degenerate: a buffer of 0 tokens punishes only responses longer than the limit.

    Args:
        max_tokens: L_max, the limit. A run's own is `rollout.max_new_tokens`.
        buffer_tokens: L_cache, within max_tokens.
        penalty: of a response at or above the limit.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float = 1.0

    def faults(self) -> Iterator[str]:
        if self.max_tokens < 1:
            yield f"max_tokens is {self.max_tokens}: must be at least 1."
        elif not 0 <= self.buffer_tokens <= self.max_tokens:
            yield f"buffer_tokens is {self.buffer_tokens}: must lie in [0, max_tokens], which is {self.max_tokens}."
        if not 0 <= self.penalty < math.inf:
            yield f"penalty is {self.penalty}: must be finite and not negative."

    @property
    def producer(self) -> Callable:
        return self.rate_batch

    def rate_batch(self, batch: DataProto) -> Rating:
        """In [-penalty, 0] for each response; needs no texts."""
        over = response_lengths(batch) - (self.max_tokens - self.buffer_tokens)
        share = over / self.buffer_tokens if self.buffer_tokens else (over > 0).astype(float)
        return Rating(-self.penalty * np.clip(share, 0.0, 1.0) + 0.0)  # + 0.0: no -0.0 in tables


def response_lengths(batch: DataProto) -> np.ndarray:
    """Tokens of each response [B], float64."""
    return batch.batch["response_mask"].sum(dim=1).double().cpu().numpy()
