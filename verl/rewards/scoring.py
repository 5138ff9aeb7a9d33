"""The reward of a run, and metrics of what it counts."""

from __future__ import annotations

import numpy as np

from verl.protocol import DataProto
from verl.rewards.base import Reward


class Scoring:
    """Scores batches.

    Attributes:
        reward: the current one.
    """

    def __init__(self, reward: Reward | None = None):
        self.reward = Reward() if reward is None else reward
        self._counts: dict[str, list[float]] = {}

    def scored(self, rollout: DataProto, *, is_counted: bool = True) -> DataProto:
        """Responses with their rewards.

        Args:
            is_counted: whether what the reward counts belongs to the metrics of the step; not in an evaluation.
        """
        result = self.reward.score_in_time(rollout)
        for name, numbers in result.counts.items() if is_counted else ():
            self._counts.setdefault(name, []).extend(numbers)
        return rollout.union(self.reward.score_tokens(rollout, result))

    def count(self, name: str, number: float) -> None:
        """Add to a counter of the step."""
        self._counts.setdefault(name, []).append(number)

    def take_counts(self) -> dict[str, float]:
        """Metrics of the counters since the last call; see `RewardResult.counts`."""
        counts, self._counts, metrics = self._counts, {}, dict[str, float]()
        for name, numbers in counts.items():
            if not name.endswith("_s"):
                metrics[f"reward/{name}"] = float(sum(numbers))
            elif numbers:
                middle, late = np.percentile(numbers, [50, 95])
                metrics |= {f"reward/{name[:-2]}_p50_s": float(middle), f"reward/{name[:-2]}_p95_s": float(late)}
        return metrics
