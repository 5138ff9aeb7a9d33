"""`environment=guess_number`: a game of several turns: guess a number, with the hints higher and lower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.environments.base import Action, Environment, EnvironmentDescription, EnvironmentFactory, StepResult


class _Game(Environment):
    recovery = "deterministic"
    answers_at_once = True

    def __init__(self, options: GuessNumber):
        self.options, self.secret, self.guesses = options, 0, 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.secret, self.guesses = int(row["secret"]), 0

    async def step(self, action: Action) -> StepResult:
        self.guesses += 1
        text = action.text.strip()
        if not text.isdecimal() or len(text) > 9:
            return StepResult("?\n", truncated=self.guesses >= self.options.max_guesses)
        if int(text) == self.secret:
            return StepResult(reward=1.0, terminated=True, info={"guesses": self.guesses})
        hint = "higher\n" if int(text) < self.secret else "lower\n"
        return StepResult(hint, truncated=self.guesses >= self.options.max_guesses)


@component
class GuessNumber(EnvironmentDescription):
    """Reward 1 for the guess that is the column `secret`; anything else is answered by `higher`, `lower` or `?`.

    Args:
        max_guesses: number of guesses after which the game ends.
    """

    max_guesses: PositiveInt = 4

    def columns_read(self) -> tuple[str, ...]:
        return ("secret",)

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: _Game(self))
