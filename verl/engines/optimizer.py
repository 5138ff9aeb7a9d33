"""AdamW and its learning-rate schedule, as one component."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import nn

from verl.component import Description, UnitInterval, component
from verl.ops.resharding.dtensor import mesh_dims

_log = logging.getLogger(__name__)

LARGE_PARAMETERS, LARGE_LR, LARGEST_LR = 3e8, 1e-6, 1e-3


def lr_for_size(parameters: int) -> float:
    """Default peak learning rate for policy updates, by the number of parameters of the model.

        lr(N) = 1e-6 * max(1, 3e8 / N)^0.8, and at most 1e-3

    1e-6 is the usual rate of reinforcement learning from a fine-tuned model. Below 300 million parameters the rate
    rises; the exponent was fitted on the built-in model of half a million parameters.
    """
    return min(LARGEST_LR, LARGE_LR * max(1.0, LARGE_PARAMETERS / max(1, parameters)) ** 0.8)


Beta = Annotated[float, Field(ge=0, lt=1)]


@component
class AdamW(Description):
    """Adam with decoupled weight decay, and a learning rate that is a pure function of the number of updates made.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.

    Args:
        lr: peak learning rate; null chooses one by the number of parameters, see `lr_for_size`.
        betas, eps, weight_decay: as in the paper; weight decay acts on matrices only.
        max_grad_norm: gradients of a larger global L2 norm are scaled down to it; null for no clipping.
        schedule: how the learning rate changes after the warm-up, over all updates of the run.
        warmup_updates: updates over which the rate rises linearly from 0.
        final_fraction: the fraction of `lr` that `linear` and `cosine` reach at the last update.
    """

    lr: NonNegativeFloat | None = None
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: NonNegativeInt = 0
    final_fraction: UnitInterval = 0.0

    def for_model(self, model: nn.Module, factor: float = 1.0, path: str = "") -> AdamW:
        """This component with `lr` filled in, if it is null: `factor` times `lr_for_size` of the model.

        Args:
            path: of the role, such as `critic.`.
        """
        if self.lr is not None:
            return self
        count = sum(parameter.numel() for parameter in model.parameters())
        chosen = float(f"{factor * lr_for_size(count):.2g}")
        _log.info("%soptimizer.lr is null: using %g for a model of %.3g million parameters", path, chosen, count / 1e6)
        return replace(self, lr=chosen)

    def learning_rate(self, update: int, total: int) -> float:
        """The rate of update number `update` (from 0) out of `total`."""
        assert self.lr is not None, "for_model chooses one"
        if update < self.warmup_updates:
            return self.lr * (update + 1) / self.warmup_updates
        done = min(1.0, (update - self.warmup_updates) / max(1, total - self.warmup_updates))
        falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[
            self.schedule
        ]
        floor = 1.0 if self.schedule == "constant" else self.final_fraction
        return self.lr * (floor + (1.0 - floor) * falling)

    def attach(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """The torch optimizer over the parameters that require gradients."""
        assert self.lr is not None, "for_model chooses one"
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}  # a fused step takes parameters of one layout
        for p in (p for p in parameters if p.requires_grad):
            alike.setdefault((p.ndim < 2, mesh_dims(p)), []).append(p)
        groups = [{"params": alike[key], "weight_decay": 0.0 if key[0] else self.weight_decay} for key in sorted(alike)]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True)
