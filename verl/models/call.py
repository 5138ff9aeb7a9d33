"""Calling a model with the inputs that it takes."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

OPTIONAL = ("position_ids", "logits_to_keep", "use_cache", "attention_mask")


def call_model(model: Any, **inputs: Any) -> Any:
    """A forward pass, without those of the optional inputs that the model has no parameter for.

    Some models count positions by themselves, and some state-space models read no attention mask.
    """
    taken = _parameters(type(unwrapped(model)))
    return model(**{name: x for name, x in inputs.items() if name not in OPTIONAL or taken is None or name in taken})


def takes(model: Any, name: str) -> bool:
    """Whether the forward of a model has a parameter of this name, or takes any."""
    taken = _parameters(type(unwrapped(model)))
    return taken is None or name in taken


def has_lm_head(model: Any) -> bool:
    """Whether a Hugging Face model gives logits of tokens; critics and reward models do not."""
    return hasattr(model, "lm_head") or model.get_output_embeddings() is not None


def layers_around(model: Any) -> list[Any]:
    """A model and what is inside of it, down to the Hugging Face model itself: adapters and compiled forms, if any."""
    found = [model]
    while (base := unwrapped_once(found[-1])) is not found[-1]:
        found.append(base)
    return found


def unwrapped(model: Any) -> Any:
    """The Hugging Face model itself, without an adapter or a compiled form around it."""
    return layers_around(model)[-1]


def unwrapped_once(model: Any) -> Any:
    """Without its outermost adapter or compiled form; a plain model as it is."""
    if hasattr(model, "_orig_mod"):
        return model._orig_mod
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@functools.lru_cache
def _parameters(kind: type[nn.Module]) -> frozenset[str] | None:
    """Names that a forward takes; None where it passes on any."""
    parameters = inspect.signature(kind.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)
