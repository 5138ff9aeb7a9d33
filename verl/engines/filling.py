"""A model that was made without weights, and divided, filled with what this process holds of each of them."""

from __future__ import annotations

import torch
from torch import nn

from verl.models.weight_files import WeightFiles
from verl.resharding.dtensor import local, own_box
from verl.utils.progress import report


@torch.no_grad()
def fill(model: nn.Module, files: WeightFiles, device: torch.device, resting: torch.device) -> None:
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
    for name, parameter in model.named_parameters():
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
