"""A game whose observations are pictures: of the seed, of the turn, and of what the model wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_models import picture

from verl.component import BuildContext, component
from verl.environments.base import Environment, EnvironmentDescription, EnvironmentFactory, StepResult


class PictureGame(Environment):
    """Pays for each character of a turn."""

    recovery = "deterministic"
    answers_at_once = True

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:  # type: ignore[override]
        self.number = seed % 1000
        return self.shown()

    def step(self, action: Any) -> StepResult:  # type: ignore[override]
        self.number += 1000 + sum(map(ord, action.text))
        return StepResult(self.shown(), len(action.text) / 10)

    def shown(self) -> list[dict[str, Any]]:
        image = picture(self.number, 16 + 8 * (self.number % 2))
        return [{"role": "user", "content": ["look: ", {"type": "image", "image": image}, f"{self.number % 10}"]}]


@component
class PictureGames(EnvironmentDescription):
    """Games until a limit."""

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return EnvironmentFactory(PictureGame)
