"""The mark of a tensor that is divided over the processes that train, each of which reads its own part alone.

part of W ──> its rows of W x, or its term of them ──┐
part of W ──> ...                                  ──┴── join ──> the mark of W, as if W had been whole
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.resharding.layout import Box
from verl.sync.marks import Mark, as_array, dtype_name, mark_of
from verl.sync.shards import Shard
from verl.sync.vectors import Vectors, full_precision


@torch.no_grad()
def shard_of(part: Tensor, box: Box, shape: Sequence[int], vectors: Vectors, dtype: torch.dtype) -> Shard:
    """What a part tells of the mark of its tensor, a vector or a matrix, as an engine has it that computes in `dtype`.

    Args:
        part: of the tensor.
        box: where it lies in the tensor.
        shape: of the whole tensor.
    """
    if len(shape) < 2:
        return Shard(mark_of(part, vectors, dtype), shape[0] if shape else 1, box[0][0] if box else 0)
    (first, last), (left, right) = box
    if (left, right) == (0, shape[1]):
        return Shard(mark_of(part, vectors, dtype), shape[0], first)
    inputs = vectors.inputs(shape[1], torch.float32, part.device)[:, left:right]
    values = torch.zeros(len(inputs), last - first, device=part.device)
    rounded = part.detach().to(dtype).float()
    with full_precision():
        torch.mv(rounded, inputs[0].contiguous(), out=values[0])
    for value, column in zip(values[1:], vectors.columns(shape[1]), strict=True):
        if left <= column < right:
            value.copy_(rounded[:, column - left])
    return Shard(Mark(as_array(values), shape[1], dtype_name(dtype)), shape[0], first, is_term=True)


def upright(part: Tensor, box: Box, shape: Sequence[int]) -> tuple[Tensor, Box, tuple[int, ...]]:
    """A part of a matrix that a model keeps as [in, out], as one of [out, in]."""
    return part.T, (box[1], box[0]), (shape[1], shape[0])
