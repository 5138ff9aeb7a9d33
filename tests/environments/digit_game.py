"""A game of several turns for random models: every turn is answered by a number that depends on all turns before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, Recovery, StepResult


class DigitGame:
    """Goes on for four turns, unless a sum of letters ends it earlier."""

    def __init__(self, recovery: Recovery):
        self.recovery, self.total, self.turns = recovery, 0, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.total = seed % 97
        return f"{self.total % 10}"

    def step(self, action: Any) -> StepResult:
        self.turns += 1
        said = sum(map(ord, action.text))
        self.total = said % 10 if self.recovery == "stateless" else (self.total * 31 + said) % 1009
        is_over = said % 11 == 0 or (self.recovery != "stateless" and self.turns >= 4)
        return StepResult(f"{self.total % 10}", float(self.total % 5), terminated=is_over)


@component
class DigitGames(EnvironmentDescription):
    """Games whose environment says of itself what `recovery` says."""

    recovery: Recovery = "deterministic"
    has_rewards = True

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return _Factory(self.recovery)


class _Factory(EnvironmentFactory):
    def __init__(self, recovery: Recovery):
        self.recovery: Recovery = recovery

    def make(self) -> DigitGame:
        return DigitGame(self.recovery)
