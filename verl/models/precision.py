"""Computing in a narrower type than the weights are kept in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from verl.models.division import casts_weights

Autocast = Literal["bfloat16"] | None


@dataclass(frozen=True)
class Numerics:
    """What the log-probs of the trainer and of the engine that samples are computed with.

    Attributes:
        trainer, engine: types, as `compute_type` names them.
        engine_kind: class of the engine.
        temperature: that divides the logits.
    """

    trainer: str
    engine: str
    engine_kind: str
    temperature: float


def compute_type(model: nn.Module, autocast: Autocast = None) -> str:
    """The coarsest type in which a model computes: `float64`, `float32`, `tf32`, `float16`, `bfloat16` or narrower.

    That of its weights, of `autocast`, or for float32 what torch is told to multiply it in
    (`torch.set_float32_matmul_precision`).
    """
    if autocast is not None:
        return autocast
    found = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    name = str(max(found, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
    if name == "float32":
        return {"highest": "float32", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bfloat16")
    return name


@contextlib.contextmanager
def computing_in(dtype: Autocast, model: nn.Module) -> Iterator[None]:
    """Within, `model` computes in `dtype`, weights, activations and all; None changes nothing.

    Every weight is replaced by its copy in that type, through which gradients reach the weight itself, in its own type.
    Each is cast once for all that is done inside, where torch.autocast would cast weights and activations at every
    product. The backward pass belongs inside too, since gradient checkpointing computes forward again.

    A submodule may keep its own type: those in `model.computes_in_own_type` do (a value head). A model that was divided
    over processes may cast its weights itself, as it gathers them.
    """
    if dtype is None or casts_weights(model):
        yield
        return
    narrow = getattr(torch, dtype)
    kept = {id(p) for part in getattr(model, "computes_in_own_type", ()) for p in part.parameters()}
    copies: dict[int, torch.Tensor] = {}  # tied weights stay tied
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None or weight.dtype == narrow or not weight.is_floating_point() or id(weight) in kept:
                    continue
                if id(weight) not in copies:
                    copies[id(weight)] = weight.to(narrow)
                replaced.append((module._parameters, name, weight))
                module._parameters[name] = copies[id(weight)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, weight in replaced:
            parameters[name] = weight
