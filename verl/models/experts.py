"""Finds experts and routers in mixture-of-experts models of transformers."""

from __future__ import annotations

from typing import Any


def expert_layers(model: Any) -> dict[str, Any]:
    """Modules with the experts of a layer, by name, in the layout that transformers' expert kernels expect."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }


def expert_count(config: dict[str, Any]) -> int | None:
    """Number of experts per layer, from a configuration; None for a model without experts."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if count := config.get(name):
            return int(count)
    return None


def routers(model: Any) -> list[Any]:
    """The routers of a model in order of layers; each returns (logits, weights, expert indices)."""
    modules = []
    for name, experts in expert_layers(model).items():
        parent = model.get_submodule(name.partition(".experts")[0])
        inner = [
            child
            for child in parent.children()
            if child is not experts
            and hasattr(child, "top_k")
            and hasattr(child, "weight")
            and hasattr(child, "num_experts")
        ]
        modules += inner[:1]
    return modules
