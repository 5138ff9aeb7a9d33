"""RMS norms by torch's fused kernel: one kernel forward and three backward, where transformers' modules take 8 and 13.

module: x / rms(x), rounded to the type of x, times weight          kernel: the same, rounded once
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 16  # of numbers that a module and the kernel are compared on


def fuse_rms_norms(model: nn.Module) -> set[type]:
    """Make a model's RMS norms use the kernel, in place, where both compute the same but for rounding.

    What a kind of module computes is found by trying, in float32 and bfloat16: norms by 1 + weight, with a gate or
    without a weight are left as they are.

    Returns:
        The kinds of modules that use it now.
    """
    kinds: dict[type, type | None] = {}
    for module in model.modules():
        if (kind := type(module)) not in kinds:
            kinds[kind] = _fused(kind) if _equals_kernel(module) else None
        if (fused := kinds[kind]) is not None:
            module.__class__ = fused
    return {kind for kind in kinds.values() if kind is not None}


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.no_grad()
def _equals_kernel(module: Any) -> bool:
    weight = module._parameters.get("weight")
    if "RMSNorm" not in type(module).__name__ or len(list(module.parameters())) != 1 or weight is None:
        return False
    if weight.ndim != 1 or not isinstance(_epsilon(module), float):
        return False
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, len(weight), generator=draw)
    trial, gains = copy.copy(module), 0.5 + torch.rand(len(weight), generator=draw)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):  # bfloat16: a unit in the last place
        trial._parameters = {"weight": nn.Parameter(gains.to(dtype))}
        try:
            wanted = trial(x.to(dtype))
        except TypeError:  # it needs a gate
            return False
        found = F.rms_norm(x.to(dtype), weight.shape, trial.weight, _epsilon(module))
        if wanted.dtype != dtype or not torch.allclose(found.float(), wanted.float(), rtol=bound, atol=1e-7):
            return False
    return True


@functools.cache  # one for all models of a process: programs of torch.compile are for a class
def _fused(kind: type) -> type:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if (weight := self.weight).dtype != hidden_states.dtype or weight.dtype == torch.float64:  # computed in float32
            return kind.forward(self, hidden_states)  # type: ignore[attr-defined]
        return F.rms_norm(hidden_states, weight.shape, weight, _epsilon(self))

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "forward": forward, "unfused": kind})
