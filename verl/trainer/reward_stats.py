"""What a reward has learned of scores, in checkpoints: with what it rates by, since to another reward it means nothing.

reward ── state ──> scheduler/state.json: reward, reward_of ── load ──> the same reward: goes on
                                                              └───────> another one: begins anew, and that is told
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl.component import as_plain
from verl.rewards.base import Reward, RewardDescription
from verl.trainer.identity import differences, reward_identity

_log = logging.getLogger(__name__)


class RewardStats:
    """Of one reward.

    Args:
        description: of the reward; files and models that it names are hashed once, if it has anything to save.
    """

    def __init__(self, description: RewardDescription):
        self._description = description
        self._known: dict[str, Any] | None = None

    def state(self, reward: Reward) -> dict[str, Any]:
        """For a checkpoint."""
        learned = reward.state_dict()
        return {"reward": learned, "reward_of": self._identity} if learned else {"reward": learned}

    def load(self, reward: Reward, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. One of a version that did not say whose statistics it holds is trusted."""
        learned, found = state["reward"], dict[str, Any]()
        if learned and reward.state_dict() and "reward_of" in state:
            found = differences({"reward": state["reward_of"]}, {"reward": self._identity})
        if found:
            reward.reset_stats()
            _log.warning("The reward is another one (%s): its statistics of scores begin anew.", ", ".join(found))
        else:
            reward.load_state_dict(learned)

    @property
    def _identity(self) -> dict[str, Any]:
        if self._known is None:
            self._known = reward_identity(as_plain(self._description))
        return self._known
