"""Reward normalisation by running mean and standard deviation of all scores in training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verl.component import BuildContext, Description, component
from verl.errors import RewardError, faults_below
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult, in_time


class RunningStats:
    """Mean and variance over a stream of batches.

        n' = n + m        d = mean(x) - mu        mu' = mu + d * m / n'
        M' = M + sum (x - mean(x))^2 + d^2 * n * m / n'                      variance = M / n

    Source: Welford 1962, in the form for batches of Chan, Golub and LeVeque 1979, eq. 2.1.
    Degenerate: before the first update scores are returned unchanged; equal scores become 0.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Reset the statistics, e.g. after the reward has changed."""
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def variance(self) -> float:
        return self._squares / self.count if self.count else 1.0

    def update(self, scores: np.ndarray) -> None:
        """Add scores [B] to the statistics."""
        if not len(scores):
            return
        total, distance = self.count + len(scores), float(scores.mean()) - self.mean
        self._squares += float(((scores - scores.mean()) ** 2).sum())
        self._squares += distance**2 * self.count * len(scores) / total
        self.mean += distance * len(scores) / total
        self.count = total

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Normalise scores [B] with the current statistics."""
        spread = math.sqrt(self.variance)
        return (scores - self.mean) / spread if spread > 1e-8 * (1 + abs(self.mean)) else scores - self.mean

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])


@component
class RewardNormalization(RewardDescription):
    """Normalise the scores of another reward by their running mean and standard deviation; see `RunningStats`.

    The scores before normalisation are the metric `reward/raw`. Evaluation uses the statistics without updating them.
    They are saved with checkpoints; `reset_reward_stats()` of a trainer resets them.

    Args:
        reward: the reward to normalise.
    """

    reward: Description

    def columns_read(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.reward, RewardDescription):
            yield from ((f"reward.{named_by}", column) for named_by, column in self.reward.columns_read())

    def build(self, context: BuildContext) -> Reward:
        with faults_below("reward"):
            return ScaledReward(in_time(self.reward.build(context)))


class ScaledReward(Reward):
    """A reward whose scores are normalised by running statistics; `close` also closes the reward itself.

    Args:
        has_state: whether the reward itself has statistics, which are saved together with those of the scores.
    Attributes:
        norm: the statistics.
    """

    def __init__(self, reward: Reward, has_state: bool = True):
        self.reward, self.norm, self._learns, self._has_state = reward, RunningStats(), True, has_state
        self.scores_ahead, self.scores_groups = reward.scores_ahead, reward.scores_groups

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score every row; the part `raw` has the scores before normalisation."""
        return self.apply(self.prepare(batch), batch)

    def prepare(self, batch: DataProto) -> RewardResult:
        return self.reward.prepare(batch)

    def apply(self, result: RewardResult, batch: DataProto) -> RewardResult:
        result = self.reward.apply(result, batch)
        if not len(result.scores):
            return result
        if result.token_scores is not None:
            raise RewardError(
                "The reward returns token-level rewards, but normalisation needs one score for each response. Turn "
                "normalisation off, or return one number for each response."
            )
        if self._learns:
            self.norm.update(result.scores[~np.isnan(result.scores)])
        parts = {"raw": result.scores, **result.parts}
        return RewardResult(self.norm(result.scores), parts, result.columns, nan_is_none=result.nan_is_none)

    def check_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        with faults_below("reward"):
            return self.reward.check_rows(name, rows)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        before, self._learns = self._learns, False
        try:
            with self.reward.frozen():
                yield
        finally:
            self._learns = before

    def reset_stats(self) -> None:
        self.norm.reset()
        self.reward.reset_stats()

    def state_dict(self) -> dict[str, Any]:
        norm = self.norm.state_dict()
        return {"norm": norm, "reward": self.reward.state_dict()} if self._has_state else dict(norm)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        norm = state.get("norm", {}) if self._has_state else state
        if self.norm.state_dict().keys() <= norm.keys():  # else of another reward
            self.norm.load_state_dict(norm)
        self.reward.load_state_dict(state.get("reward", {}))

    def close(self) -> None:
        self.reward.close()
