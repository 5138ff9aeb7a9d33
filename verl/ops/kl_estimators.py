"""Estimates per token of KL(pi || ref), in nats, from tokens that pi sampled.

Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    estimator   value                         mean over pi          never below 0
    k1          log pi - log ref              the KL                no
    k2          (log pi - log ref)^2 / 2      near the KL           yes
    k3          ref/pi - 1 - log(ref/pi)      the KL                yes

As a loss, on tokens of the current policy: the mean gradient of k1 is zero, that of k2 is the KL's own, and that of
k3 is the gradient of KL(ref || pi).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log pi - log ref, [B, T] from two of [B, T]: unbiased, of either sign, of high variance."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2, [B, T] from two of [B, T]: biased, low variance, right to second order."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi), [B, T] from two of [B, T]: unbiased and never negative.

    Unbiased where pi gives mass to all that ref does. Grows as exp where ref likes a token far more than pi does.
    """
    difference = ref_log_probs - log_probs
    return torch.expm1(difference) - difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
