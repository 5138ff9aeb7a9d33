"""The marks of a layer of experts in vLLM, each expert's matrices by the names of the Hugging Face model.

    experts.E.gate_proj  <── w13_weight[E], its upper half      experts.E.down_proj  <── w2_weight[E]
    experts.E.up_proj    <── w13_weight[E], its lower half

Kernels for the CPU keep the entries of a matrix in another order. It is found by packing numbers as weights are packed:
they tell where they went. Kernels that change more than the order are left to the probe.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from verl.sync.marks import mark_of
from verl.sync.shards import Shard
from verl.sync.vectors import Vectors

IN_ORDER = ("TRITON", "BATCHED_TRITON")  # kernels that take weights as they are loaded
PACKED = "CPU"
BLOCK = 32  # rows that are packed among themselves
DIGITS = 3  # of base 256, which every type holds exactly


class ExpertReader:
    """The experts of one layer on one rank.

    Args:
        layer: vLLM's `RoutedExperts`.
        name: of the experts in the Hugging Face model, such as `model.layers.0.mlp.experts`.
    """

    def __init__(self, layer: Any, name: str):
        self.layer, self.name, self.config = layer, name, layer.moe_config
        places = enumerate(layer.expert_map.tolist()) if layer.expert_map is not None else None
        everyone = ((number, number) for number in range(layer.local_num_experts))
        self.numbers = [(number, place) for number, place in places or everyone if place >= 0]

    def marks(self, vectors: Vectors) -> Iterator[tuple[str, Shard]]:
        """The shards of every expert's matrices, one expert's unpacked at a time."""
        layer, width = self.layer, self.config.hidden_dim_unpadded
        own, ranks = self.config.intermediate_size_per_partition_unpadded, self.config.tp_size
        rows, offset = own * ranks, own * self.config.tp_rank
        for number, place in self.numbers:
            both, down = (self._in_order(w[place]) for w in (layer.w13_weight, layer.w2_weight))
            half = len(both) // 2
            for part, matrix in ((layer.ckpt_gate_proj_name, both[:half]), (layer.ckpt_up_proj_name, both[half:])):
                yield self._named(number, part), Shard(mark_of(matrix[:own, :width], vectors), rows, offset)
            shown = placed(down[:width, :own], rows, offset) if ranks > 1 else down[:width, :own]
            yield self._named(number, layer.ckpt_down_proj_name), Shard(mark_of(shown, vectors), width, 0, ranks > 1)

    def _named(self, number: int, part: str) -> str:
        return f"{self.name}.{number}.{part}.weight"

    def _in_order(self, weight: Tensor) -> Tensor:
        """A matrix of one expert as it was before its kernel packed it."""
        kind = _packing(self.layer)
        return weight if kind is None else unpacked(weight, kind)


def reader_of(runner: Any, name: str) -> ExpertReader | None:
    """Of a module that holds a layer of experts; None if that cannot be read."""
    layers = [m for m in runner.modules() if "RoutedExperts" in {kind.__name__ for kind in type(m).__mro__}]
    if len(layers) != 1 or not _is_plain(layers[0]):
        return None
    reader = ExpertReader(layers[0], name)
    return reader if _packing(layers[0]) is None or _is_undone(layers[0]) else None


def _is_plain(layer: Any) -> bool:
    """Whether each expert is three matrices without more, in a kernel that at most reorders their entries."""
    method, config = layer.quant_method, layer.moe_config
    if type(method).__name__ != "UnquantizedFusedMoEMethod" or config.has_bias or not config.is_act_and_mul:
        return False
    backend, experts = method.unquantized_backend.name, getattr(method.moe_kernel, "fused_experts", None)
    is_known = backend in IN_ORDER or (backend == PACKED and getattr(experts, "_use_zentorch", None) is False)
    is_even = config.intermediate_size_per_partition_unpadded * config.tp_size == config.intermediate_size
    return is_known and is_even and not config.moe_parallel_config.enable_eplb


def _packing(layer: Any) -> str | None:
    """The kind of packing that vLLM's kernel for the CPU has; None for weights that are in order."""
    method = layer.quant_method
    return method.moe_kernel.fused_experts.isa if method.unquantized_backend.name == PACKED else None


def _is_undone(layer: Any) -> bool:
    """Whether what is unpacked becomes, packed again, what the kernel has: shown by the first expert."""
    kind = _packing(layer)
    assert kind is not None
    weights = (layer.w13_weight[0], layer.w2_weight[0])
    return all(len(w) % BLOCK == 0 and torch.equal(packed(unpacked(w, kind), kind), w) for w in weights)


def packed(weight: Tensor, kind: str) -> Tensor:
    """A matrix as vLLM packs it."""
    found = torch.empty_like(weight)
    torch.ops._C.prepack_moe_weight(weight[None].contiguous(), found[None], kind)
    return found


def unpacked(weight: Tensor, kind: str) -> Tensor:
    """A matrix as it was before."""
    order = _order(kind, weight.shape[1], weight.dtype)
    return weight.reshape(-1, len(order)).index_select(1, order).view(weight.shape)


@lru_cache(maxsize=8)
def _order(kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Where each entry of a block of rows lies after packing."""
    numbers = torch.arange(BLOCK * width)
    digits = [(numbers >> 8 * digit & 255).to(dtype).view(BLOCK, width) for digit in range(DIGITS)]
    went = sum(packed(digit, kind).flatten().long() << 8 * number for number, digit in enumerate(digits))
    assert isinstance(went, Tensor)
    return went.argsort()


def placed(matrix: Tensor, width: int, offset: int) -> Tensor:
    """This rank's columns at their place among all, with zeros for those of other ranks."""
    wide = matrix.new_zeros(len(matrix), width)
    wide[:, offset : offset + matrix.shape[1]] = matrix
    return wide
