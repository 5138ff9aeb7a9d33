"""Weights of a pipeline stage that are sharded over processes, and gathered while micro-batches pass through the stage.

at rest      a shard of every weight, its gradient and its optimizer state
for a step   gather all weights of the stage ──> every micro-batch, forward and backward ──> reduce-scatter gradients

A stage runs many small micro-batches, so weights are gathered once for all of them, and gradients are accumulated
locally and reduced once. During a step a process therefore holds all weights and gradients of its stage. (`fully_shard`
of torch gathers for every micro-batch, and its hooks expect a forward pass that runs to its end.)

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO), with the sharing of the first stage at rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.ops.resharding.dtensor import at_stage_of, is_divided, is_on_other_stage, local, mesh_dims
from verl.utils.progress import report

BUCKET_BYTES = 25 * 2**20  # per process, gathered by one collective


@dataclass(frozen=True)
class _ShardedWeight:
    """A sharded parameter and the modules that use it; several where it is tied."""

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter in the stage: whole, or the slice of a tensor-parallel rank or an expert's owner."""
        shape = list(self.parameter.shape)
        for number, placement in enumerate(self.parameter.placements[1:], start=1):  # type: ignore[attr-defined]
            if hasattr(placement, "dim"):
                shape[placement.dim] //= self.parameter.device_mesh.size(number)  # type: ignore[attr-defined]
        return torch.Size(shape)

    @property
    def rows(self) -> int:
        """Rows of each shard; the last shards may have fewer."""
        return -(-self.shape[0] // self.parameter.device_mesh.size(0))  # type: ignore[attr-defined]

    @property
    def part_numel(self) -> int:
        """Elements of a shard, padded to `rows`."""
        return self.rows * self.shape[1:].numel()


def shard_rows(data: Tensor, mesh: Any, device: torch.device | str) -> Tensor:
    """Shard a tensor by its first dimension over a mesh, without communication.

    Args:
        data: the whole tensor, or one sharded over tensor-parallel ranks or owners of experts; on the meta device it
            gives uninitialised memory.
        mesh: of one dimension, and for sharded data a second one, over which it is sharded.
        device: of the shard.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shard, rest = local(data), list(getattr(data, "placements", ()))
    assert mesh.ndim == 1 + len(rest), (mesh, rest)
    count, rank = mesh.size(0), mesh.get_local_rank(0)
    rows = -(-shard.shape[0] // count)
    first = min(rank * rows, shard.shape[0])
    shard = shard[first : min(first + rows, shard.shape[0])].detach()
    shard = torch.empty_like(shard, device=device) if shard.is_meta else shard.to(device, copy=True).contiguous()
    # A slice's rows are cut again: the mesh's first dimension then divides what its second has left.
    by_rows = _StridedShard(0, split_factor=mesh.size(1)) if rest and rest[0] == Shard(0) else Shard(0)
    return DTensor.from_local(shard, mesh, [by_rows, *rest], run_check=False, shape=data.shape, stride=data.stride())


class StageShards:
    """The sharded weights of one stage of a model.

    Args:
        model: its parameters that `shard_rows` put on the mesh are handled; others are left alone.
        mesh: of one dimension.
        divided_mesh: mesh of the tensor-parallel ranks, or owners of experts, that share some of them.
    """

    def __init__(self, model: nn.Module, mesh: Any, divided_mesh: Any):
        self._group, self._size, self._divided_mesh = mesh.get_group(), mesh.size(), divided_mesh
        (dimension,) = mesh.mesh_dim_names
        weights: dict[int, _ShardedWeight] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and dimension in mesh_dims(parameter):
                    weight = weights.setdefault(id(parameter), _ShardedWeight(parameter, []))
                    weight.places.append((module, name))
        self._weights = list(weights.values())

    @contextlib.contextmanager
    def whole(self, trains: bool = False) -> Iterator[None]:
        """Inside this context the process has the whole parameters of the stage. Collective on entry and on exit.

        Args:
            trains: on exit gradients are reduce-scattered, so that every process has its shard of their sum.
        """
        local = [weight for weight in self._weights if not is_on_other_stage(weight.parameter)]
        gathered = dict(zip(map(id, local), self._gather([weight.parameter for weight in local]), strict=True))
        wholes: list[tuple[_ShardedWeight, nn.Parameter]] = []
        try:
            for weight in self._weights:
                p = weight.parameter
                data = gathered.get(id(weight))
                data = torch.empty(weight.shape, dtype=p.dtype, device="meta") if data is None else data
                whole = nn.Parameter(self._as_divided(p, data), requires_grad=p.requires_grad and trains)
                at_stage_of(p, whole)
                wholes.append((weight, whole))
                for module, name in weight.places:
                    module._parameters[name] = whole
            gathered.clear()
            yield
            if trains:
                self._reduce([(w.parameter, x) for w, x in wholes if not is_on_other_stage(x) and x.requires_grad])
        finally:
            for weight, _ in wholes:
                for module, name in weight.places:
                    module._parameters[name] = weight.parameter

    def _as_divided(self, parameter: Tensor, data: Tensor) -> Tensor:
        """Parameter that the stage runs with: where others divide it, a slice that stands for the whole."""
        rest = parameter.placements[1:]  # type: ignore[attr-defined]
        if not rest:
            return data
        from torch.distributed.tensor import DTensor

        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(data, self._divided_mesh, rest, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def _gather(self, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
        """Yield each parameter gathered."""
        for bucket in _buckets(parameters):
            weights = [_ShardedWeight(parameter, []) for parameter in bucket]
            sent = torch.cat([_padded(local(w.parameter), w.part_numel) for w in weights])
            received = sent.new_empty(self._size * len(sent))
            dist.all_gather_single(received, sent, group=self._group)
            parts = received.view(self._size, -1).split([w.part_numel for w in weights], dim=1)
            for weight, x in zip(weights, parts, strict=True):
                shape = weight.shape
                yield x.reshape(self._size * weight.rows, *shape[1:])[: shape[0]].contiguous()
            report()

    @torch.no_grad()
    def _reduce(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Reduce-scatter gradients over the processes; a missing gradient counts as zeros."""
        whole_of = {id(parameter): whole for parameter, whole in pairs}
        for bucket in _buckets([parameter for parameter, _ in pairs]):
            weights, columns = [_ShardedWeight(parameter, []) for parameter in bucket], []
            for weight in weights:
                whole = whole_of[id(weight.parameter)]
                grad: Any = torch.zeros_like(whole) if whole.grad is None else whole.grad
                whole.grad = None
                if is_divided(grad) and grad.placements != whole.placements:  # type: ignore[attr-defined]
                    grad = grad.redistribute(placements=whole.placements)  # type: ignore[attr-defined]
                grad = local(grad)
                columns.append(_padded(grad, self._size * weight.part_numel).view(self._size, -1))
            sent = torch.cat(columns, dim=1).flatten()
            shard = sent.new_empty(len(sent) // self._size)
            dist.reduce_scatter_single(shard, sent, group=self._group)
            for weight, x in zip(weights, shard.split([w.part_numel for w in weights]), strict=True):
                _add_gradient(weight.parameter, x)
            report()


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, up to `BUCKET_BYTES` each."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (bucket[0].dtype != parameter.dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _padded(x: Tensor, numel: int) -> Tensor:
    flat = x.reshape(-1)
    return flat if len(flat) == numel else torch.cat([flat, flat.new_zeros(numel - len(flat))])


def _add_gradient(parameter: nn.Parameter, part: Tensor) -> None:
    """Add this process's shard of a gradient, which may be padded, to the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    shard = local(parameter.grad)
    shard += part[: shard.numel()].view_as(shard)
