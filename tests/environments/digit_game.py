"""A game of several turns for random models: every turn is answered by a number that depends on all turns before it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, Recovery, StepResult

FATAL_STEP = 8


class DigitGame:
    """Goes on for four turns, unless a sum of letters ends it earlier."""

    num_steps = 0  # in this process, since there is a `fatal` file

    def __init__(self, games: DigitGames):
        self.recovery, self.answers_at_once, self.fatal = games.recovery, games.answers_at_once, games.fatal
        self.total, self.turns = 0, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.total = seed % 97
        return f"{self.total % 10}"

    def step(self, action: Any) -> StepResult:
        self.turns += 1
        if self.fatal and Path(self.fatal).exists():
            DigitGame.num_steps += 1
            if DigitGame.num_steps == FATAL_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
        said = sum(map(ord, action.text))
        self.total = said % 10 if self.recovery == "stateless" else (self.total * 31 + said) % 1009
        is_over = said % 11 == 0 or (self.recovery != "stateless" and self.turns >= 4)
        return StepResult(f"{self.total % 10}", float(self.total % 5), terminated=is_over)


@component
class DigitGames(EnvironmentDescription):
    """Games whose environment says of itself what `recovery` says.

    Args:
        fatal: once there is such a file, the process that plays is killed in the turn FATAL_STEP.
    """

    recovery: Recovery = "deterministic"
    answers_at_once: bool = False
    fatal: str = ""

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: DigitGame(self))
