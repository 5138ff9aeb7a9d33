"""A game of one turn whose answer, for one prompt, waits until a reward has rated the responses to another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, StepResult

PATIENCE_S = 20.0


class WaitingGame:
    """Ends with its first turn."""

    recovery = "stateless"

    def __init__(self, games: WaitingGames):
        self.games, self.is_slow = games, False

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.is_slow = row["length"] == self.games.slow
        return ""

    def step(self, action: Any) -> StepResult:
        directory, until = Path(self.games.directory), time.monotonic() + PATIENCE_S
        while self.is_slow and not (directory / f"rated_{self.games.awaited}").exists():
            if time.monotonic() > until:
                (directory / "waited_in_vain").touch()
                break
            time.sleep(0.01)
        else:
            if self.is_slow:
                (directory / "waited_for_it").touch()
        return StepResult("", 0.0, terminated=True)


@component
class WaitingGames(EnvironmentDescription):
    """Args: lengths of the slow prompt and of the awaited one; where the reward writes `rated_LENGTH`."""

    slow: int = 0
    awaited: int = 0
    directory: str = ""

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _Factory(self)


class _Factory(EnvironmentFactory):
    def __init__(self, games: WaitingGames):
        self.games = games

    def make(self) -> WaitingGame:
        return WaitingGame(self.games)
