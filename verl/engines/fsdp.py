"""FSDP2: weights, gradients and optimizer state sharded over processes; a block is whole while it runs.

forward   gather block ──> run ──> free it        backward   gather block ──> gradients ──> reduce-scatter

`load_own_slices` reads this rank's slice of every weight into a sharded model that was built without weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from verl.models.pretrained import SafetensorsReader
from verl.resharding.dtensor import is_elsewhere, local, own_box
from verl.utils.progress import report


def shard_fully(
    model: nn.Module,
    mesh: Any,
    *,
    reshard: bool,
    compute_dtype: torch.dtype | None,
    offload: bool,
    pin: bool,
    experts: Sequence[nn.Module] = (),
    expert_mesh: Any = None,
) -> None:
    """Divide a Hugging Face model over a mesh of processes, block by block, in place.

    What lies outside of the blocks (embeddings, the last norm, the output head) stays whole from one forward pass to
    its backward pass, or to `settle`: the head is called apart from the model.

    Args:
        mesh: one dimension to shard over, or two: replicas, and shards of each.
        reshard: let go of a block's weights after its forward pass, and gather them again for its backward pass.
        compute_dtype: that weights are gathered in, if not their own; gradients are added up in their own.
        offload: parts rest in main memory, with their optimizer state.
        pin: that memory, for copies to a GPU.
        experts: modules that are divided over another mesh, beside that over which they were already.
        expert_mesh: that mesh.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    own = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=own if compute_dtype else None)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy(),
    }
    for module in experts:  # the weights of a router stay in its own type, as they do in one process
        own_options = {"mesh": expert_mesh, "mp_policy": dataclasses.replace(policy, cast_forward_inputs=False)}
        fully_shard(module, reshard_after_forward=reshard, **{**options, **own_options})
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(1.0)  # losses are divided by global counts: gradients are added
        unit.set_force_sum_reduction_for_comms(True)
    cast(Any, model).set_reduce_scatter_unused_params(True)  # a process may not have used all that a sibling did


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, each of which is gathered at once."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if found:
        return found
    return [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]


def units_of(model: nn.Module) -> list[Any]:
    """The modules that are gathered, each at once: the model, and its blocks."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def settle(model: nn.Module) -> None:
    """Let go of what was gathered."""
    for unit in units_of(model):
        unit.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module, reshard: bool) -> Iterator[None]:
    """The whole model in this process. All processes enter and leave together; between, they are on their own."""
    units = units_of(model)
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(reshard and unit is not model, recurse=False)
            unit.reshard()


@torch.no_grad()
def load_own_slices(model: nn.Module, files: SafetensorsReader, device: torch.device, resting: torch.device) -> None:
    """Give a model its memory and read its weights: of each, only the slice that this process has.

    Args:
        device: where it computes, and has its buffers.
        resting: where its weights are meanwhile.
    """
    shared = _shared_parameters(model)
    buffers = [(module, name, x) for module in model.modules() for name, x in module._buffers.items() if x is not None]
    model.to_empty(device=resting)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(device)
    for (first, name), *others in shared:  # `to_empty` unties
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    read_slices(model, files)


@torch.no_grad()
def read_slices(model: nn.Module, files: SafetensorsReader) -> None:
    """Read into the parameters and buffers of a model what this process has of them."""
    for name, parameter in model.named_parameters():
        if is_elsewhere(parameter):
            continue
        own = local(parameter)
        if own.numel():
            own.copy_(files.read(name, own_box(parameter)).view_as(own))
        report()
    for name, buffer in model.named_buffers():
        if files.name_of(name) is not None:
            buffer.copy_(files.read(name))


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that stands in several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]
