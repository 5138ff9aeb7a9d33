"""FSDP2: weights, gradients and optimizer state sharded over processes; each block is gathered while it runs.

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

from verl.models.images import vision_tower
from verl.models.model_files import SafetensorsReader
from verl.ops.resharding.dtensor import is_on_other_stage, local, own_box
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
    """Shard a Hugging Face model over a mesh of processes, block by block, in place.

    Parameters outside the blocks (embeddings, final norm, output head) stay gathered from a forward pass to its
    backward pass, or to `free_gathered_parameters`, because the head is called separately from the model.

    Args:
        mesh: of one dimension (shards) or two (replicas, shards).
        reshard: free a block's gathered weights after its forward pass and gather them again for its backward pass.
        compute_dtype: dtype that weights are gathered in; None for their own. Gradients are reduced in the dtype of the
            weights.
        offload: keep the shards and their optimizer state in main memory.
        pin: pin that memory, for faster copies to a GPU.
        experts: modules, already sharded by expert parallelism, that are sharded over `expert_mesh` instead of `mesh`.
        expert_mesh: one dimension, the processes that hold the same experts.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    dtype = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=dtype if compute_dtype else None)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy(),
    }
    for module in experts:  # a router keeps its dtype, as in a single process
        own_options = {"mesh": expert_mesh, "mp_policy": dataclasses.replace(policy, cast_forward_inputs=False)}
        fully_shard(module, reshard_after_forward=reshard, **{**options, **own_options})
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(1.0)  # losses are divided by global counts, so gradients are summed
        unit.set_force_sum_reduction_for_comms(True)
    cast(Any, model).set_reduce_scatter_unused_params(True)  # a process may use fewer parameters than another


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model, each a unit of FSDP.

    Those of a vision tower are no units of their own: a process whose rows have no image does not gather them.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    tower = vision_tower(getattr(model, "backbone", model))
    seeing = set() if tower is None else set(tower.modules())
    named = [module for module in model.modules() if type(module).__name__ in names and module not in seeing]
    if named:
        return named
    return [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]


def units_of(model: nn.Module) -> list[Any]:
    """All FSDP units: the model itself and its blocks."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def free_gathered_parameters(model: nn.Module) -> None:
    for unit in units_of(model):
        unit.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module, reshard: bool) -> Iterator[None]:
    """Inside this context all weights are gathered. All processes enter and leave together."""
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
def load_own_slices(model: nn.Module, files: SafetensorsReader, device: torch.device, storage: torch.device) -> None:
    """Allocate a sharded model that is on the meta device and read only the slices that this process holds.

    Args:
        model: sharded by `shard_fully`.
        files: the checkpoint to read.
        device: the device of computation and of buffers.
        storage: the device of the shards between forward passes; main memory where they are offloaded.
    """
    shared = [owners for owners in parameter_owners(model).values() if len(owners) > 1]
    buffers = [(module, name, x) for module in model.modules() for name, x in module._buffers.items() if x is not None]
    model.to_empty(device=storage)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(device)
    for (first, name), *others in shared:  # `to_empty` unties shared parameters
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    read_slices(model, files)


@torch.no_grad()
def read_slices(model: nn.Module, files: SafetensorsReader) -> None:
    """Read this process's slices of the parameters and buffers of a model, in place."""
    for name, parameter in model.named_parameters():
        if is_on_other_stage(parameter):
            continue
        shard = local(parameter)
        if shard.numel():
            shard.copy_(files.read(name, own_box(parameter)).view_as(shard))
        report()
    transient = {
        f"{path}.{name}".lstrip(".") for path, x in model.named_modules() for name in x._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient and files.name_of(name) is not None:
            buffer.copy_(files.read(name))


def parameter_owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """(module, attribute) pairs of each parameter, by `id`; several of one that is tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return owners
