"""The marks of a low-rank adapter, W + scale B A, on both sides: A, and B with its scale.

The engine's are read from the slot that requests with the adapter use, so one that was loaded but binds to no layer,
under other names say, is found out: its slot is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl.models.parallel_info import full_tensor
from verl.sync.engine_layers import PACKED, kinds_of, layer_parts
from verl.sync.marks import mark_of, plain_name
from verl.sync.shards import Shard, Shards
from verl.sync.vectors import Vectors

A, B = "lora_A", "lora_B"


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Each A [rank, in] and each scaled B [out, rank] of a peft model, by the name of its layer."""
    adapter = model.active_adapter
    for path, module in model.named_modules():
        if adapter in getattr(module, A, {}):
            name = plain_name(path)
            yield f"{name}.{A}", full_tensor(module.lora_A[adapter].weight)
            yield f"{name}.{B}", full_tensor(module.lora_B[adapter].weight) * module.scaling[adapter]


@torch.no_grad()
def adapter_shards(manager: Any, adapter_id: int, rank: int, vectors: Vectors) -> Shards:
    """One engine rank's part of the adapter, read from vLLM's manager of adapters; empty if it is not in use.

    Args:
        manager: `LoRAModelManager`.
        adapter_id: `lora_int_id` of the request.
        rank: of the adapter; the engine's own may be larger.
    """
    if adapter_id not in manager.lora_index_to_id:
        return {}
    slot = manager.lora_index_to_id.index(adapter_id)
    packed = PACKED | dict(getattr(manager.model, "packed_modules_mapping", None) or {})
    found: Shards = {}
    for path, module in manager.modules.items():
        layer = getattr(module, "base_layer", None)
        if layer is None or "LinearBase" not in kinds_of(layer):
            continue
        is_term = "RowParallelLinear" in kinds_of(layer) and layer.tp_size > 1
        for index, part in enumerate(layer_parts(layer, plain_name(path), kinds_of(layer), packed)):
            is_fused = len(module.lora_a_stacked) == 1  # one adapter over all parts
            a = module.lora_a_stacked[0 if is_fused else index][slot, 0, :rank]
            b = module.lora_b_stacked[0 if is_fused else index][slot, 0, :, :rank]
            shown = _placed(a, layer) if is_term else a
            own = b[part.local] if is_fused else b
            shard_a = Shard(mark_of(shown, vectors), rank, is_term=is_term)
            shard_b = Shard(mark_of(own, vectors), part.rows, 0 if is_term else part.offset)
            found.setdefault(f"{part.name}.{A}", []).append(shard_a)
            found.setdefault(f"{part.name}.{B}", []).append(shard_b)
    return found


def _placed(a: Tensor, layer: Any) -> Tensor:
    """This rank's inputs of A at their place among all, with zeros for those of other ranks."""
    start = layer.tp_rank * a.shape[1]
    wide = a.new_zeros(a.shape[0], layer.input_size)
    wide[:, start : start + a.shape[1]] = a
    return wide
