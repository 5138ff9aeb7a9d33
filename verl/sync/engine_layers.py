"""The marks of a vLLM model, taken through its layers and given by the names of the Hugging Face model.

    q_proj, k_proj, v_proj  <── qkv_proj        one product, cut into the rows of each
    gate_proj, up_proj      <── gate_up_proj
    lm_head                 <── lm_head, or the embedding where the two are tied: as the sampler reads it
    norms, biases           <── themselves

Runs in the engine's processes, one rank at a time. Layers are known by the names of their classes, so that vLLM is
imported nowhere here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.sync.marks import Mark, as_array, dtype_name, mark_of, plain_name
from verl.sync.shards import Shard, Shards, whole
from verl.sync.vectors import Vectors, full_precision

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD = "lm_head.weight"
_EXPERTS = ("FusedMoE", "MoERunner")  # packed in many ways, and no product of one matrix: the probe alone proves them


class Part:
    """The rows of one Hugging Face tensor within a layer of the engine.

    Attributes:
        name: of the tensor's module.
        local: where its rows lie in what this rank's layer gives.
        rows, offset: how many the whole tensor has, and at which of them this rank's part begins.
    """

    def __init__(self, name: str, local: slice, rows: int, offset: int):
        self.name, self.local, self.rows, self.offset = name, local, rows, offset


class LayerReader:
    """One rank's part of the model.

    Args:
        model: vLLM's.
        vectors: of this sync.
        dtype: that the engine computes in.
    """

    def __init__(self, model: nn.Module, vectors: Vectors, dtype: torch.dtype):
        self.model, self.vectors, self.dtype = model, vectors, dtype
        self.packed = PACKED | dict(getattr(model, "packed_modules_mapping", None) or {})

    @torch.no_grad()
    def shards(self) -> tuple[Shards, list[str]]:
        """The shards of every tensor by its name, and the beginnings of the names that cannot be read."""
        found: Shards = {}
        unproven: list[str] = []
        embedding = None
        with full_precision():
            for path, module in self.model.named_modules():
                kinds, name = kinds_of(module), plain_name(path)
                if any(name.startswith(beginning) for beginning in unproven):
                    continue
                if kinds & set(_EXPERTS):
                    unproven.append(f"{name}.")
                elif "ParallelLMHead" in kinds:
                    found[f"{name}.weight"] = [self._vocabulary(module, as_head=True)]
                    found |= self._vectors_of(module, name, skip=("weight",))
                elif "VocabParallelEmbedding" in kinds:
                    embedding = embedding or module
                    found[f"{name}.weight"] = [self._vocabulary(module, as_head=False)]
                elif "LinearBase" in kinds:
                    for tensor, shard in self._linear(module, name, kinds):
                        found.setdefault(tensor, []).append(shard)
                else:
                    found |= self._vectors_of(module, name)
            if embedding is not None and self._reads_as_head(embedding):
                found[HEAD] = [self._vocabulary(embedding, as_head=True)]
        return found, unproven

    def _reads_as_head(self, embedding: nn.Module) -> bool:
        if hasattr(self.model, "lm_head"):
            return self.model.lm_head is embedding
        return not any("ParallelLMHead" in kinds_of(module) for module in self.model.modules())

    def _linear(self, layer: Any, name: str, kinds: set[str]) -> Iterator[tuple[str, Shard]]:
        is_term = "RowParallelLinear" in kinds and layer.tp_size > 1
        width = layer.input_size
        start = layer.tp_rank * layer.input_size_per_partition if is_term else 0
        part = slice(start, start + layer.input_size_per_partition) if is_term else slice(None)
        values, dtype = self._through(layer, width, part)
        for piece in layer_parts(layer, name, kinds, self.packed):
            mark = Mark(as_array(values[:, piece.local]), width, dtype)
            yield f"{piece.name}.weight", Shard(mark, piece.rows, piece.offset, is_term)
            if getattr(layer, "bias", None) is not None:
                bias = mark_of(layer.bias[piece.local], self.vectors)
                yield f"{piece.name}.bias", Shard(bias, piece.rows, 0 if is_term else piece.offset)

    def _vocabulary(self, layer: Any, *, as_head: bool) -> Shard:
        """An embedding as it is looked up, or a head as it makes logits; rows that only fill up are left out."""
        indices = layer.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        if as_head or not layer.weight.numel():
            values, dtype = self._through(layer, layer.embedding_dim, slice(None))
            mark = Mark(as_array(values[:, : end - start]), layer.embedding_dim, dtype)
        else:
            mark = mark_of(layer.weight[: end - start], self.vectors)
        return Shard(mark, layer.org_vocab_size, start)

    def _through(self, layer: Any, width: int, part: slice) -> tuple[Tensor, str]:
        """What a layer makes of the vectors without its bias, [1 + columns, rows], and the type it computes in."""
        weight = layer.weight
        dtype = weight.dtype if weight.numel() else self.dtype
        device = next(self.model.parameters()).device
        inputs = self.vectors.inputs(width, dtype, device)[:, part].contiguous()
        values = layer.quant_method.apply(layer, inputs, bias=None)
        return values, dtype_name(values.dtype)

    def _vectors_of(self, module: nn.Module, name: str, skip: tuple[str, ...] = ()) -> Shards:
        """The parameters of a module that is no layer of its own kind: norms and the like, whole on every rank."""
        return {
            f"{name}.{key}": [whole(mark_of(weight, self.vectors))]
            for key, weight in module._parameters.items()
            if weight is not None and key not in skip
        }


def layer_parts(layer: Any, name: str, kinds: set[str], packed: dict[str, list[str]]) -> Iterator[Part]:
    """The Hugging Face tensors within a linear layer, in its order."""
    pieces = _pieces(layer, kinds)
    parent, _, last = name.rpartition(".")
    names = [f"{parent}.{part}" if parent else part for part in packed.get(last, [last])]
    is_fused = len(names) != len(pieces)  # fused in the Hugging Face model too
    here = before = 0
    for index, (total, local, place) in enumerate(pieces):
        rows, offset = slice(here, here + local), place * local
        if is_fused:
            yield Part(names[0], rows, sum(piece[0] for piece in pieces), before + offset)
        else:
            yield Part(names[index], rows, total, offset)
        here, before = here + local, before + total


def _pieces(layer: Any, kinds: set[str]) -> list[tuple[int, int, int]]:
    """Of each tensor that a layer was packed from: its rows, those on this rank, and which part in order they are."""
    if "QKVParallelLinear" in kinds:
        value_size = getattr(layer, "v_head_size", layer.head_size)
        kv_part = layer.tp_rank // layer.num_kv_head_replicas
        return [
            (layer.total_num_heads * layer.head_size, layer.num_heads * layer.head_size, layer.tp_rank),
            (layer.total_num_kv_heads * layer.head_size, layer.num_kv_heads * layer.head_size, kv_part),
            (layer.total_num_kv_heads * value_size, layer.num_kv_heads * value_size, kv_part),
        ]
    sizes = getattr(layer, "output_sizes", None) or [layer.output_size]
    if "ColumnParallelLinear" in kinds:
        return [(size, size // layer.tp_size, layer.tp_rank) for size in sizes]
    return [(size, size, 0) for size in sizes]


def kinds_of(module: nn.Module) -> set[str]:
    """The names of a module's classes."""
    return {kind.__name__ for kind in type(module).__mro__}
