"""A user-defined module over tensor-parallel processes: DTensors between forward passes, plain tensors within.

between passes  DTensors, which gradient clipping, the optimizer, saving and loading work on
within a pass   the plain tensors that the module was built with, in the same memory; their gradients are copied back
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.models.own_module import OwnModule
from verl.ops.resharding.dtensor import is_divided, local


class OwnModuleParts:
    """The local shards of a user-defined module.

    Args:
        model: its parameters are replaced by DTensors, in place.
        mesh: of one dimension, the tensor-parallel processes.
    Attributes:
        summed: parameters whose gradients must be summed over the mesh.
    """

    def __init__(self, model: OwnModule, mesh: Any):
        from torch.distributed.tensor import DTensor, Shard

        if model.place.size != mesh.size():
            raise ConfigError(
                f"model is a {type(model.module).__name__}: it was built for {model.place.size} tensor-parallel "
                f"processes, but there are {mesh.size()}."
            )
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self.summed: list[nn.Parameter] = []
        names = {id(p): name for name, p in model.named_parameters()}
        parameters: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is None:
                    continue
                part = model.part_of(names[id(p)])
                if part.sums_gradient:
                    self.summed += [p] if all(p is not other for other in self.summed) else []
                if part.dim is None:
                    continue
                if id(p) not in parameters:
                    laid_out = DTensor.from_local(p.detach(), mesh, [Shard(part.dim)], run_check=False)
                    parameters[id(p)] = nn.Parameter(laid_out, requires_grad=p.requires_grad)
                whole = parameters[id(p)]
                self._places.setdefault(id(whole), []).append((module, key))
                self._parameters[id(whole)] = whole
        for number, places in self._places.items():
            for module, key in places:
                module._parameters[key] = self._parameters[number]

    @contextlib.contextmanager
    def running(self, trains: bool = False) -> Iterator[None]:
        """Inside this context the module has its plain tensors; `trains` copies their gradients back."""
        plain = {
            number: nn.Parameter(local(p), requires_grad=p.requires_grad and trains)
            for number, p in self._parameters.items()
        }
        try:
            for number, places in self._places.items():
                for module, key in places:
                    module._parameters[key] = plain[number]
            yield
            for number, p in self._parameters.items():
                if (grad := plain[number].grad) is not None:
                    _add_gradient(p, grad)
        finally:
            for number, places in self._places.items():
                for module, key in places:
                    module._parameters[key] = self._parameters[number]


@torch.no_grad()
def _add_gradient(parameter: nn.Parameter, grad: Tensor) -> None:
    assert is_divided(parameter)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local(parameter.grad).add_(grad)
