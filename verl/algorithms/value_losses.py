"""Value losses: per token, how far the critic is from the returns.

B responses, T response length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.component import Description


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Description):
    """Base of the value losses."""

    def __call__(self, values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, to be minimised.

        Args:
            values: [B, T], of the critic being updated; carries gradient.
            batch: [B, T] tensors: values (those the returns were made with), returns, response_mask.
        Returns:
            The loss [B, T], 0 off the mask, and stats, each [B, T], 0 off the mask and without gradient.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ClippedValueLoss(ValueLoss):
    """Half the squared error, the worse of that of V and of V held near its old self.

        V_held = V_old + clip(V - V_old, -clip, clip)
        L      = max((V - R)^2, (V_held - R)^2) / 2

    Source: the value loss of the PPO2 code that goes with Schulman et al. 2017, arXiv:1707.06347, not of the paper.
    Degenerate: off the mask the loss and its gradient are 0, whatever stands there.

    Stats per token: `clip_fraction`, 1 where the held error decided the loss, so that no gradient flows; `error`,
    V - R with its sign.

    Args:
        clip: how far a value may usefully move from its old self, in units of reward, above 0; None is the plain
            squared error.
    Raises:
        ConfigError: clip not above 0.
    """

    clip: float | None = 0.2

    def faults(self) -> Iterator[str]:
        if self.clip is not None and not 0 < self.clip < math.inf:
            yield f"clip is {self.clip}: must be a finite number above 0, or null."

    def __call__(self, values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask, old_values, returns = batch["response_mask"], batch["values"], batch["returns"]
        error = torch.where(mask, values - returns, 0.0)
        squared = error.square()
        is_clipped = torch.zeros_like(mask)
        if self.clip is not None:
            moved = values - old_values
            held = old_values + moved.clamp(-self.clip, self.clip)
            held_squared = torch.where(mask, held - returns, 0.0).square()
            is_clipped = (moved.abs() > self.clip) & (held_squared > squared)  # V_old + (V - V_old) may round above V
            squared = torch.maximum(squared, held_squared)
        stats = {"clip_fraction": is_clipped.to(squared.dtype), "error": error.detach()}
        return 0.5 * squared, stats
