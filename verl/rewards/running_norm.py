"""Scores on a scale of their own: less the mean and over the standard deviation of all scores so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


class RunningNorm:
    """Mean and variance over a stream of batches.

        n' = n + m        d = mean(x) - mu        mu' = mu + d * m / n'
        M' = M + sum (x - mean(x))^2 + d^2 * n * m / n'                      variance = M / n

    Source: Welford 1962, in the form for batches of Chan, Golub and LeVeque 1979, eq. 2.1.
    Degenerate: before the first batch nothing is changed; equal scores become 0.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget all scores, as after a change of what gives them."""
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def variance(self) -> float:
        return self._squares / self.count if self.count else 1.0

    def update(self, scores: np.ndarray) -> None:
        """Take in scores [B]."""
        if not len(scores):
            return
        total, distance = self.count + len(scores), float(scores.mean()) - self.mean
        self._squares += float(((scores - scores.mean()) ** 2).sum())
        self._squares += distance**2 * self.count * len(scores) / total
        self.mean += distance * len(scores) / total
        self.count = total

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The scores [B] on the scale of those taken in so far."""
        spread = math.sqrt(self.variance)
        return (scores - self.mean) / spread if spread > 1e-8 * (1 + abs(self.mean)) else scores - self.mean

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])
