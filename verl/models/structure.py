"""The structure of a model: which inputs it accepts, the layers around it, its experts and routers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

OPTIONAL = ("position_ids", "logits_to_keep", "use_cache", "attention_mask")


def call_model(model: Any, images: Any = None, **inputs: Any) -> Any:
    """Run a forward pass, without optional inputs that the model's forward does not accept.

    Some models compute positions themselves, and some state-space models have no attention mask.

    Args:
        images: `verl.model_paths.images.RowImages` of the rows; None without images.
    """
    if images is not None:
        with images.inserted(model, inputs) as whole:
            return call_model(model, **whole)
    taken = _parameters(type(unwrapped(model)))
    return model(**{name: x for name, x in inputs.items() if name not in OPTIONAL or taken is None or name in taken})


def has_lm_head(model: Any) -> bool:
    """Whether a Hugging Face model returns token logits; critics and reward models do not."""
    return hasattr(model, "lm_head") or model.get_output_embeddings() is not None


def layers_around(model: Any) -> list[Any]:
    """A model and the modules that it wraps (peft, torch.compile), down to the Hugging Face model."""
    layers = [model]
    while (base := unwrapped_once(layers[-1])) is not layers[-1]:
        layers.append(base)
    return layers


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside wrappers of peft and torch.compile."""
    return layers_around(model)[-1]


def unwrapped_once(model: Any) -> Any:
    """Remove the outermost wrapper of peft or torch.compile; a plain model is returned unchanged."""
    if hasattr(model, "_orig_mod"):
        return model._orig_mod
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@functools.lru_cache
def _parameters(kind: type[nn.Module]) -> frozenset[str] | None:
    """Parameter names of a forward; None if it has `**kwargs`."""
    parameters = inspect.signature(kind.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


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
