"""Losses of training sessions, by name: sums over target tokens of a function of log-probabilities and inputs.

With l the log-probability of a target token, q that of the policy that sampled it, A its advantage and r = exp(l - q),
the loss of a token is

    cross_entropy        -w l                                          any targets, weighted; [N K] for K of them each
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) A l                   sg: without gradient
    gspo                 -min(s A, clip(s, low, high) A)               s: ratio of the sequence, see `_gspo`
    dro                  -(A l - beta / 2 (l - q)^2)

Sums, not means, as in the protocol of Tinker: the caller scales weights and advantages.

Sources: Schulman et al. 2017, arXiv:1707.06347, eq. 7 (ppo); MiniMax 2025, arXiv:2506.13585, eq. 4-5 (cispo); Zheng et
al. 2025, arXiv:2507.18071, eq. 13-15 (gspo); Richemond et al. 2024, arXiv:2405.19107 (dro).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.component import hint, nearest
from verl.errors import ConfigError

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss per target token.

    Attributes:
        per_token: from log-probs [b T] (or [b T K]), the inputs of the same shape and the settings.
        inputs: names of the inputs that a datum must have, besides the targets.
        optional: further inputs, with the value of a datum without them.
        settings: names and defaults.
        ignores: inputs that are all zero for a target whose log-prob has no influence on the loss; empty if there is
            no such target.
    """

    per_token: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    optional: Mapping[str, float] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    ignores: tuple[str, ...] = ("advantages",)


def _cross_entropy(log_probs: Tensor, x: Inputs, _: Settings) -> Tensor:
    return -log_probs * x["weights"]


def _importance_sampling(log_probs: Tensor, x: Inputs, _: Settings) -> Tensor:
    return -(log_probs - x["logprobs"]).exp() * x["advantages"]


def _clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ppo(log_probs: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return _clipped((log_probs - x["logprobs"]).exp(), x["advantages"], settings)


def _cispo(log_probs: Tensor, x: Inputs, settings: Settings) -> Tensor:
    ratio = (log_probs.detach() - x["logprobs"]).exp()
    return -ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"]) * x["advantages"] * log_probs


def _gspo(log_probs: Tensor, x: Inputs, settings: Settings) -> Tensor:
    """s = exp(mean of l - q over the tokens of `sequence_ratio_mask`), with the gradient of each token's l (eq. 14)."""
    mask = x["sequence_ratio_mask"]
    total = ((log_probs.detach() - x["logprobs"]) * mask).sum(dim=1, keepdim=True)
    mean = total / mask.sum(dim=1, keepdim=True).clamp_min(1)
    return _clipped((mean + log_probs - log_probs.detach()).exp(), x["advantages"], settings)


def _dro(log_probs: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -(log_probs * x["advantages"] - 0.5 * settings["beta"] * (log_probs - x["logprobs"]).square())


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_MASK = "sequence_ratio_mask"
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, inputs=(), optional={"weights": 1.0}, ignores=("weights",)),
    "importance_sampling": Loss(_importance_sampling),
    "ppo": Loss(_ppo, settings=_CLIP),
    "cispo": Loss(_cispo, settings=_CLIP),
    "gspo": Loss(
        _gspo,
        optional={_MASK: 1.0},
        settings={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        ignores=("advantages", _MASK),
    ),
    "dro": Loss(_dro, settings={"beta": 0.05}, ignores=()),
}


def loss_of(name: str, settings: Mapping[str, object]) -> tuple[Loss, Settings]:
    """A loss by its name, with its settings.

    Raises:
        ConfigError: there is no such loss or setting, a value is no number, or nothing lies between two limits.
    """
    if (loss := LOSSES.get(name)) is None:
        raise ConfigError(f"loss_fn is {name!r}: there are {', '.join(LOSSES)}.{hint(nearest(name, LOSSES))}")
    for key, value in settings.items():
        if key not in loss.settings or not isinstance(value, int | float) or math.isnan(value):
            known = ", ".join(loss.settings) or "none"
            raise ConfigError(f"loss_fn_config.{key} is {value!r}: the settings of {name} are numbers: {known}.")
    chosen: Any = {**loss.settings, **settings}
    low, high = chosen.get("clip_low_threshold", 0.0), chosen.get("clip_high_threshold", math.inf)
    if low > high:
        raise ConfigError(
            f"loss_fn_config.clip_low_threshold is {low}: more than clip_high_threshold, which is {high}."
        )
    return loss, chosen
