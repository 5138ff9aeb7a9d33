"""A game of one turn that, for one prompt, begins only after a reward has rated the responses to another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, StepResult

PATIENCE_S = 50.0  # less than a reset may take


class WaitingGame:
    """Ends with its first turn."""

    recovery = "stateless"

    def __init__(self, games: WaitingGames):
        self.games = games

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        directory, until = Path(self.games.directory), time.monotonic() + PATIENCE_S
        if row["length"] == self.games.slow:
            while not (is_rated := (directory / f"rated_{self.games.awaited}").exists()) and time.monotonic() < until:
                await asyncio.sleep(0.01)
            (directory / ("waited_for_it" if is_rated else "waited_in_vain")).touch()
        return ""

    def step(self, action: Any) -> StepResult:
        return StepResult("", 0.0, terminated=True)


@component
class WaitingGames(EnvironmentDescription):
    """Args: lengths of the slow prompt and of the awaited one; where the reward writes `rated_LENGTH`."""

    slow: int = 0
    awaited: int = 0
    directory: str = ""

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: WaitingGame(self))
