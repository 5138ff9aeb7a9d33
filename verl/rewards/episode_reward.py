"""`reward=environment`: rewards from the environment, each on the last token of its turn."""

from __future__ import annotations

from typing import ClassVar

from verl.component import component
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult


@component
class EpisodeReward(RewardDescription, Reward):
    """The sum of the environment's rewards over the turns of an episode; requires `environment=`."""

    needs_environment: ClassVar[bool] = True

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Use `turn_rewards` [B T] as token scores."""
        if "turn_rewards" not in batch:
            raise RewardError("The batch has no turn_rewards: reward=environment scores episodes of an environment.")
        rewards = batch["turn_rewards"]
        return RewardResult(rewards.double().sum(dim=1).cpu().numpy(), token_scores=rewards)
