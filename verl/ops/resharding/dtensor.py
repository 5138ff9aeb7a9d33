"""Layouts of DTensors: what this process holds of a sharded tensor.

DTensor (mesh, placements) ──> TensorLayout ──> the box of any rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.ops.resharding.layout import Box, Layout, Mesh, TensorLayout


def local(x: Tensor) -> Tensor:
    """Part of a tensor on this process, sharing its memory."""
    if not is_divided(x):
        return x
    with torch.no_grad():
        return x.detach().to_local()  # type: ignore[attr-defined]


def is_divided(x: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process has a local part."""
    return hasattr(x, "device_mesh")


def is_on_other_stage(x: Tensor) -> bool:
    """Whether another stage of a pipeline holds a tensor, and not this process: it stands here without data."""
    return x.is_meta and hasattr(x, "pipeline_stage")


def at_stage(x: Tensor, stage: int | None) -> Tensor:
    """The tensor, known to be held by one stage of a pipeline, or by all (None)."""
    x.pipeline_stage = stage  # type: ignore[attr-defined]
    return x


def at_stage_of(other: Tensor, x: Tensor) -> Tensor:
    """The tensor, known to be held where another is."""
    return at_stage(x, other.pipeline_stage) if hasattr(other, "pipeline_stage") else x  # type: ignore[attr-defined]


def mesh_dims(x: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh of processes that a tensor is laid out over."""
    return tuple(x.device_mesh.mesh_dim_names) if is_divided(x) else ()  # type: ignore[attr-defined]


def tensor_layout(x: Tensor) -> TensorLayout:
    """Layout of a tensor; one that is not a DTensor is whole everywhere."""
    shape, itemsize, stage = tuple(x.shape), x.element_size(), getattr(x, "pipeline_stage", None)
    if not is_divided(x):
        return TensorLayout(shape=shape, stage=stage, itemsize=itemsize)
    from torch.distributed.tensor import Replicate, Shard

    now, later = [], []
    for name, placement in zip(mesh_dims(x), x.placements, strict=True):  # type: ignore[attr-defined]
        if isinstance(placement, Replicate):
            continue
        assert hasattr(placement, "dim"), f"{placement} has no layout"
        # A strided shard divides what the dimensions of the mesh after it have left, and so comes after them.
        (now if type(placement) is Shard else later).append((name, placement.dim))
    return TensorLayout(shape=shape, splits=(*now, *later), stage=stage, itemsize=itemsize)


def layout_of(tensors: Mapping[str, Tensor], mesh: Mesh) -> Layout:
    """The layout of named tensors over the processes of a mesh."""
    return Layout(mesh, {name: tensor_layout(x) for name, x in tensors.items()})


def own_box(x: Tensor) -> Box | None:
    """Slice of a tensor on this process; None if it has nothing of it."""
    if is_on_other_stage(x):
        return None
    if not is_divided(x):
        return tuple((0, size) for size in x.shape)
    devices, index = x.device_mesh, 0  # type: ignore[attr-defined]
    for size, coordinate in zip(devices.shape, devices.get_coordinate(), strict=True):
        index = index * size + coordinate
    return replace(tensor_layout(x), stage=None).box(Mesh(tuple(zip(mesh_dims(x), devices.shape, strict=True))), index)


class ReadableTensor(Protocol):
    """A whole tensor, or one that is read where it is indexed, with a slice for each dimension or () for all."""

    shape: torch.Size
    dtype: torch.dtype

    def __getitem__(self, index: Any, /) -> Tensor: ...


def own_part(x: Tensor, whole: ReadableTensor) -> Tensor:
    """This rank's slice of `whole`, sharded like `x`: `local(x).copy_(own_part(x, whole))` loads it."""
    box = own_box(x) if x.numel() else ()
    if box is None:
        return torch.empty(local(x).shape, dtype=whole.dtype)
    return whole[tuple(slice(start, stop) for start, stop in box)]


@torch.no_grad()
def read_slice_like(x: Tensor, whole: ReadableTensor) -> Tensor:
    """`whole`, sharded like `x`, on the device of the local part of `x`: each rank reads its own slice alone.

    `DTensor.from_local` and torch's distribute_tensor would move the part to the device of the mesh, also where `x` is
    offloaded to main memory.
    """
    target = torch.empty_like(x, dtype=whole.dtype)
    local(target).copy_(own_part(x, whole))
    return target
