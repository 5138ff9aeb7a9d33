"""A reward model as a role: its processes compute scores; the driver, which has all rows, normalises them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.component import BuildContext
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows
from verl.rewards.base import Reward, RewardResult
from verl.rewards.reward_model import RewardModel

PART = "part/"


class RewardWorker:
    """The running role `rm`."""

    def __init__(self, reward: Reward):
        self.reward = reward

    @classmethod
    def start(cls, described: RewardModel, context: BuildContext) -> RewardWorker:
        """Load the model without normalisation, which the driver applies over all rows."""
        return cls(described.build_unscaled(context))

    @by_rows
    def score(self, batch: DataProto) -> DataProto:
        """`score` [B] float64 of the responses, and its parts."""
        result = self.reward.score_batch(batch)
        parts = {f"{PART}{name}": torch.as_tensor(values) for name, values in result.parts.items()}
        return DataProto.from_dict({"score": torch.from_numpy(np.ascontiguousarray(result.scores)), **parts})


class RemoteRewardModel(Reward):
    """The driver's side of the role `rm`, without normalisation.

    Args:
        role: handle of the role.
    """

    def __init__(self, role: Any):
        self.role = role

    def score_batch(self, batch: DataProto) -> RewardResult:
        if not len(batch):
            return RewardResult(np.zeros(0))
        answer = self.role.score(batch).result()
        parts = {name.removeprefix(PART): x.numpy() for name, x in answer.batch.items() if name.startswith(PART)}
        return RewardResult(answer["score"].numpy(), parts)
