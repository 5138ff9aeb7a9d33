"""What those who call a model must know of it if its weights are divided over processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.resharding.layout import Mesh, TensorLayout


@dataclass(frozen=True)
class Divided:
    """Left on a model, as its attribute `divided`, by what has divided it.

    Attributes:
        device: where it computes; weights may rest elsewhere.
        casts_weights: it computes in the narrower type that it was told, without being asked each time.
        gathered: a context in which its weights are whole in this process, so that a forward pass needs no sibling.
        mesh: of all processes that hold it.
        rank: of this process in the mesh.
        siblings: the ranks that work on the same rows as this process, itself included, in order.
        sibling_group: of torch.distributed, the siblings.
        layout_of: how a tensor of the model is divided over the mesh.
        local: what this process holds of such a tensor.
    """

    device: torch.device
    mesh: Mesh
    rank: int
    siblings: tuple[int, ...]
    sibling_group: Any
    layout_of: Callable[[Tensor], TensorLayout]
    local: Callable[[Tensor], Tensor]
    casts_weights: bool = False
    gathered: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def compute_device(model: Any) -> torch.device:
    """Where a model computes."""
    divided = getattr(model, "divided", None)
    return next(model.parameters()).device if divided is None else divided.device


def casts_weights(model: Any) -> bool:
    """Whether a model computes in a narrower type by itself."""
    divided = getattr(model, "divided", None)
    return divided is not None and divided.casts_weights


def weights_gathered(model: Any) -> AbstractContextManager[None]:
    """Within, this process may call the model as often as it likes, whatever its siblings do.

    For generation: gathering each layer for each token would be slow, and would hang as soon as one process has
    finished its last response. Entering and leaving it is done by all processes together.
    """
    divided = getattr(model, "divided", None)
    return contextlib.nullcontext() if divided is None else divided.gathered()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is divided over processes, put together: all of them ask for it, in the same order."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has whole, divided as another is; nothing is sent."""
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
