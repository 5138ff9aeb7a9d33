"""A divided model's tensors made whole, each on one process, one after the other, as a checkpoint's files have them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.engines.parallel_dims import Parallelism
from verl.resharding.dtensor import layout_of, local
from verl.resharding.execute import reshard
from verl.resharding.layout import Layout, Mesh, TensorLayout
from verl.resharding.plan import reshard_plan
from verl.utils.progress import report


def whole_on_first(tensors: Mapping[str, Tensor], parallel: Parallelism) -> dict[str, Tensor]:
    """Copies in main memory on rank 0, nothing elsewhere; all processes take part."""
    return whole_on_owners(tensors, dict.fromkeys(tensors, 0), parallel)


def whole_on_owners(
    tensors: Mapping[str, Tensor], owner: Mapping[str, int], parallel: Parallelism
) -> dict[str, Tensor]:
    """Copies in main memory of the tensors that this process owns; all processes take part.

    Beside the copies, a process needs memory for a few tensors at a time. A tensor under two names, such as an output
    head that is the embedding, is gathered once, and is one tensor again.

    Args:
        owner: of each tensor, under the first of its names.
    """
    names = first_names(tensors)
    once = {name: tensors[name] for name in names.values()}
    source = layout_of(once, parallel.mesh)
    stages = Mesh((("pp", parallel.world_size),))  # a pipeline, each stage of which has some tensors whole
    target = Layout(
        stages,
        {n: TensorLayout(t.shape, stage=owner[n], itemsize=t.itemsize) for n, t in source.tensors.items()},
    )
    own = {name for name in once if owner[name] == parallel.rank}
    whole = {name: torch.empty(once[name].shape, dtype=once[name].dtype) for name in own if not once[name].numel()}
    moves = reshard(
        reshard_plan(source, target),
        lambda name: local(once[name]).to(parallel.device),
        parallel.rank,
        dtypes={name: x.dtype for name, x in once.items()},
        device=parallel.device,
    )
    for name, tensor in moves:
        whole[name] = tensor.cpu()
        report()
    return {name: whole[first] for name, tensor in tensors.items() if (first := names[id(tensor)]) in own}


def first_names(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """Of each tensor, by its `id`, the first of its names."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return names
