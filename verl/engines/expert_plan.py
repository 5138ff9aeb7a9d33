"""The experts of a mixture in a tensor-parallel plan: each process has some of them, whole, and adds what they give.

tokens ──> router, whole ──> those that go to this process's experts ──> experts ──> add up over processes

Transformers' plans cut each expert instead, its gate and up projections, which are one tensor, each for itself: what a
process has would be no slice of the tensor. Its styles for whole experts come to the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

EXPERT_STYLES = {"grouped_gemm", "moe_tp_experts", "ep_router"}

_log = logging.getLogger(__name__)


def with_experts(model: Any, plan: dict[str, str], size: int) -> dict[str, str]:
    """The plan with experts divided one by one over `size` processes, or left whole where that cannot be."""
    places = {general(name): name for name, module in model.named_modules() if _holds_experts(module)}
    for place, name in places.items():
        experts, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        plan = {at: style for at, style in plan.items() if at != place and not at.startswith(f"{place}.")}
        router, count = _router_of(parent, experts.num_experts), experts.num_experts
        if router is None or count % size or model.config.get_text_config()._experts_implementation == "eager":
            _log.info("tensor parallelism: the %d experts of %s stay whole in each process", count, place)
            continue
        plan |= {f"{place}.{weight}": "grouped_gemm" for weight in experts._parameters}
        plan |= {place: "moe_tp_experts", f"{place.rpartition('.')[0]}.{router}": "ep_router"}
    return plan


def general(name: str) -> str:
    """`layers.3.q_norm` as `layers.*.q_norm`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _holds_experts(module: Any) -> bool:
    """Whether it is a collection of experts in the form that all of transformers' ways to run them share."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")


def _router_of(parent: Any, count: int) -> str | None:
    """The name of what sends tokens to so many experts, if it answers (logits, scores, numbers of experts)."""
    for name, child in parent.named_children():
        if getattr(child, "num_experts", None) == count and hasattr(child, "top_k") and hasattr(child, "weight"):
            weight = child.weight
            with torch.no_grad():
                answer = child(torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device))
            if isinstance(answer, tuple) and len(answer) == 3 and answer[1].shape == answer[2].shape:
                return name
    return None
