"""Any reward on a scale of its own: less the mean and over the standard deviation of all its scores in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.component import BuildContext, Description
from verl.errors import faults_below
from verl.protocol import DataProto
from verl.rewards.base import Rating, Reward, RewardDescription
from verl.rewards.model import NormalisedReward


@dataclass(frozen=True, kw_only=True)
class Normalized(RewardDescription):
    """Scores less their mean so far, over their standard deviation so far; see `RunningNorm`.

    The scores as they were rated are the metric `reward/raw`. Evaluation uses the statistics and adds nothing to them.
    They are saved and restored with checkpoints; `reset_reward_stats()` of a trainer forgets them.

    Args:
        reward: what rates.
    """

    reward: Description

    def build(self, context: BuildContext) -> Reward:
        with faults_below("reward"):
            return ScaledReward(self.reward.build(context))


class ScaledReward(NormalisedReward):
    """The running form of `Normalized`; `close` closes what rates."""

    def __init__(self, reward: Reward):
        super().__init__(normalize=True)
        self.reward = reward

    def raw(self, batch: DataProto) -> Rating:
        return self.reward.rate_batch(batch)

    def take(self) -> dict[str, float]:
        return self.reward.take()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        with super().frozen(), self.reward.frozen():
            yield

    def reset_stats(self) -> None:
        super().reset_stats()
        self.reward.reset_stats()

    def state_dict(self) -> dict[str, Any]:
        return {"norm": super().state_dict(), "reward": self.reward.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state.get("norm", {}))
        self.reward.load_state_dict(state.get("reward", {}))

    def close(self) -> None:
        self.reward.close()
