"""The trainer's weights by their checkpoint names, one tensor at a time, for an engine to load.

An adapter is merged into each matrix when the matrix is requested, so no second copy of the model exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from verl.models.parallel_info import Autocast, full_tensor
from verl.models.structure import unwrapped
from verl.ops.resharding.dtensor import is_on_other_stage, read_slice_like


def dtype_of(model: Any, autocast: Autocast) -> torch.dtype:
    """The data type that an engine for this model computes in."""
    return model.dtype if autocast is None else getattr(torch, autocast)


@dataclass(frozen=True)
class NamedWeight:
    """A tensor that is computed on demand from one of the running model.

    Attributes:
        name: as in the model's checkpoint.
        source: name of the tensor of the running model that it is computed from.
        tensor: that tensor in the trainer; for a sharded model a local part; without data if another pipeline stage
            holds it.
        present: returns its current value in the layout of `tensor`: the tensor itself, or with its adapter merged. A
            collective call of all processes that hold the tensor.
        form: computes this tensor from that whole value; None if it is the same tensor.
    """

    name: str
    shape: torch.Size
    source: str
    tensor: Tensor
    present: Callable[[], Tensor]
    form: Callable[[Tensor], Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a vector or matrix of the running model itself, of which any slice can be sent."""
        return self.form is None and len(self.shape) <= 2

    def make(self) -> Tensor:
        """The tensor, in the trainer's type and on its device; not a copy unless something has to be computed.

        A sharded tensor is gathered, so all processes must call this in the same order.
        """
        whole = full_tensor(self.present())
        return whole if self.form is None else self.form(whole)


def weights_of(model: Any, *, merge: bool = True) -> Iterator[NamedWeight]:
    """Every tensor that a checkpoint of the model holds, tied ones once, block by block in the order of its layers.

    Within a block (an attention, say) matrices come first, so that those that an engine merges are adjacent.

    Args:
        merge: merge the adapter, if the model has one; otherwise the base weights.
    """
    base = unwrapped(model)
    live = dict(live_weights(base, merge))
    for name, target, shape in _forms(base, live):
        is_itself = name == target and shape == live[name].shape
        form = lambda whole, n=name, t=target: _as_saved(base, n, whole)[t]  # noqa: E731
        yield replace(live[name], name=target, shape=shape, form=None if is_itself else form)


def block_of(name: str) -> str:
    """Name of the parent of the module that owns a tensor."""
    return name.rsplit(".", 2)[0]


Form = tuple[str, str, torch.Size]  # a tensor's name in the running model; one that it has in a checkpoint; the shape
_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, list[Form]]] = WeakKeyDictionary()  # finding them takes milliseconds


def _forms(base: nn.Module, live: Mapping[str, NamedWeight]) -> list[Form]:
    """Names and forms of a model's tensors in a checkpoint, in the order of `weights_of`."""
    shapes = [(name, weight.shape) for name, weight in live.items()]
    known = _KNOWN.get(base)
    if known is None or known[0] != shapes:
        forms = []
        for name in _saved_names(base, {name: weight.tensor for name, weight in live.items()}):
            tensor = live[name].tensor
            saved = _as_saved(base, name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            forms += [(name, target, value.shape) for target, value in saved.items()]
        blocks = {block: number for number, block in enumerate(dict.fromkeys(block_of(form[1]) for form in forms))}
        forms.sort(key=lambda form: (blocks[block_of(form[1])], len(form[2]) < 2))
        known = _KNOWN[base] = shapes, forms
    return known[1]


def live_weights(base: nn.Module, merge: bool) -> Iterator[tuple[str, NamedWeight]]:
    """The state of a model by name."""
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in base.state_dict(keep_vars=True).items():
        owner = next((path for path in adapted if name.startswith(f"{path}.")), None)
        if owner is None:
            yield name, NamedWeight(name, tensor.shape, name, tensor, tensor.detach)
        elif name.startswith(f"{owner}.base_layer."):
            last = name.removeprefix(f"{owner}.base_layer.")
            layer = adapted[owner]
            is_in_use = not getattr(layer, "disable_adapters", False) and not getattr(layer, "merged", False)
            is_changed = merge and last == "weight" and is_in_use
            present = (lambda m=layer: merged(m)) if is_changed else tensor.detach
            plain = f"{owner}.{last}"
            yield plain, NamedWeight(plain, tensor.shape, plain, tensor, present)


@torch.no_grad()
def merged(layer: Any) -> Tensor:
    """W + scale B A of one adapted layer, computed in the wider of both types.

    A sharded layer stays sharded: each process computes the part of B A for its part of W.
    """
    weight = layer.base_layer.weight
    total = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for name in layer.active_adapters:
        if name in layer.lora_A or name in layer.lora_embedding_A:
            total = total + _delta(layer, name, weight)
    return total


def _delta(layer: Any, adapter: str, like: Tensor) -> Tensor:
    """scale B A in the layout of W; the factors of a sharded layer may be sharded differently or not at all."""
    is_embedding = adapter in layer.lora_embedding_A
    parts = (layer.lora_embedding_A, layer.lora_embedding_B) if is_embedding else (layer.lora_A, layer.lora_B)
    a, b = (part[adapter] if is_embedding else part[adapter].weight for part in parts)
    factors = full_tensor(a), full_tensor(b)
    if factors[0] is a and factors[1] is b:
        return layer.get_delta_weight(adapter)
    delta = factors[1] @ factors[0] * layer.scaling[adapter]
    return read_slice_like(like, delta.T if is_embedding or layer.fan_in_fan_out else delta)


def _saved_names(base: Any, state: Mapping[str, Tensor]) -> list[str]:
    """The names in a saved checkpoint: tied weights once, and no tensors that are recomputed when loading."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # tied tensors are found by address; weights of other pipeline stages have none
    places = {id(x): torch.empty(1) for x in state.values() if is_on_other_stage(x)}
    saved = remove_tied_weights_from_state_dict({name: places.get(id(x), x) for name, x in state.items()}, base)
    return [name for name in state if name in saved and name not in (base._keys_to_ignore_on_save or ())]


def _as_saved(base: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The checkpoint tensors of one tensor: stacked experts are one tensor here and many in a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(base, {name: tensor}))
