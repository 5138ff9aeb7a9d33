"""Mixtures of experts, as transformers builds them: where the experts and their routers are."""

from __future__ import annotations

from typing import Any


def expert_layers(model: Any) -> dict[str, Any]:
    """The modules that hold a layer's experts in the form that all of transformers' ways to run them share, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }


def expert_count(config: dict[str, Any]) -> int | None:
    """The experts of a layer by the entries of a configuration; None for a model without."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if count := config.get(name):
            return int(count)
    return None


def routers(model: Any) -> list[Any]:
    """What sends tokens to experts and answers (logits, weights, numbers of experts), in the order of the layers."""
    found = []
    for name, experts in expert_layers(model).items():
        parent = model.get_submodule(name.partition(".experts")[0])
        own = [
            child
            for child in parent.children()
            if child is not experts
            and hasattr(child, "top_k")
            and hasattr(child, "weight")
            and hasattr(child, "num_experts")
        ]
        found += own[:1]
    return found
