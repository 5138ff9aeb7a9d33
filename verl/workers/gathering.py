"""A divided model's tensors made whole on one process, one after the other, as a checkpoint of one process has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.engines.layouts import layout_of, local
from verl.engines.parallel import Parallel
from verl.layout import Layout, Mesh, TensorLayout
from verl.resharding import plan
from verl.sync.reshard import resharded


def whole_on_first(tensors: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Tensor]:
    """Copies in main memory on rank 0, nothing elsewhere; all processes take part.

    Beside the copies, a process needs memory for a few tensors at a time. A tensor under two names, such as an output
    head that is the embedding, is gathered once, and is one tensor again.
    """
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    once = {name: tensors[name] for name in names.values()}
    source = layout_of(once, parallel.mesh)
    first = Mesh((("pp", parallel.world_size),))  # a pipeline whose first stage has everything
    target = Layout(
        first, {name: TensorLayout(t.shape, stage=0, itemsize=t.itemsize) for name, t in source.tensors.items()}
    )
    whole = {name: torch.empty(0, dtype=x.dtype).new_empty(x.shape) for name, x in once.items() if not x.numel()}
    moves = resharded(
        plan(source, target),
        lambda name: local(once[name]).to(parallel.device),
        parallel.rank,
        dtypes={name: x.dtype for name, x in once.items()},
        device=parallel.device,
    )
    for name, tensor in moves:
        whole[name] = tensor.cpu()
    if parallel.rank != 0:
        return {}
    return {name: whole[names[id(tensor)]] for name, tensor in tensors.items()}
