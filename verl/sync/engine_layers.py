"""The marks of a vLLM model, taken through its layers and given by the names of the Hugging Face model.

    q_proj, k_proj, v_proj  <── qkv_proj        one product, cut into the rows of each
    gate_proj, up_proj      <── gate_up_proj
    lm_head                 <── lm_head, or the embedding where the two are tied: as the sampler reads it
    norms, biases           <── themselves
    experts                 <── engine_experts.py

Runs in the engine's processes, one rank at a time. Layers are known by the names of their classes, so that vLLM is
imported nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.sync.engine_experts import reader_of
from verl.sync.marks import Mark, as_array, dtype_name, mark_of, plain_name
from verl.sync.shards import Shard, Shards, whole
from verl.sync.vectors import Vectors, full_precision
from verl.utils.progress import report

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD = "lm_head.weight"
EXPERTS = ("FusedMoE", "MoERunner")


class Part:
    """The rows of one Hugging Face tensor within a layer of the engine.

    Attributes:
        name: of the tensor's module.
        local: where its rows lie in what this rank's layer gives.
        rows, offset: how many the whole tensor has, and at which of them this rank's part begins.
    """

    def __init__(self, name: str, local: slice, rows: int, offset: int):
        self.name, self.local, self.rows, self.offset = name, local, rows, offset


Reading = Callable[[Vectors], Iterable[tuple[str, Shard]]]  # of one layer


class LayerReader:
    """One rank's part of the model, whose layers are looked up once and read with every sync.

    Args:
        model: vLLM's.
        dtype: that the engine computes in.
    Attributes:
        unproven: beginnings of the names that cannot be read.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.packed = PACKED | dict(getattr(model, "packed_modules_mapping", None) or {})
        self.unproven: list[str] = []
        self._readings: list[Reading] = []
        embedding, experts = None, "\0"
        for path, module in model.named_modules():
            layer: Any = module
            kinds, name = kinds_of(module), plain_name(path)
            if name.startswith(experts):
                continue
            if kinds & set(EXPERTS):
                experts = f"{name}."
                self._experts(module, name)
            elif "ParallelLMHead" in kinds:
                self._add(self._vocabulary, module, f"{name}.weight", True)
                self._add(self._own, module, name, ("weight",))
            elif "VocabParallelEmbedding" in kinds:
                embedding = embedding or module
                self._add(self._vocabulary, module, f"{name}.weight", False)
            elif "LinearBase" in kinds:
                is_term = "RowParallelLinear" in kinds and layer.tp_size > 1
                self._add(self._linear, module, list(layer_parts(module, name, kinds, self.packed)), is_term)
            elif module._parameters:
                self._add(self._own, module, name, ())
        if embedding is not None and self._reads_as_head(embedding):
            self._add(self._vocabulary, embedding, HEAD, True)

    @torch.no_grad()
    def shards(self, vectors: Vectors) -> Shards:
        """The shards of every tensor by its name, for the vectors of a sync."""
        found: Shards = {}
        with full_precision():
            for reading in self._readings:
                report()
                for name, shard in reading(vectors):
                    found.setdefault(name, []).append(shard)
        return found

    def _add(self, read: Callable[..., Iterator[tuple[str, Shard]]], *of: Any) -> None:
        self._readings.append(lambda vectors: read(vectors, *of))

    def _reads_as_head(self, embedding: nn.Module) -> bool:
        if hasattr(self.model, "lm_head"):
            return self.model.lm_head is embedding
        return not any("ParallelLMHead" in kinds_of(module) for module in self.model.modules())

    def _experts(self, runner: nn.Module, name: str) -> None:
        reader = reader_of(runner, name)
        if reader is None:
            self.unproven.append(f"{name}.")
        else:
            self._readings.append(reader.marks)

    def _linear(self, vectors: Vectors, layer: Any, parts: list[Part], is_term: bool) -> Iterator[tuple[str, Shard]]:
        width = layer.input_size
        start = layer.tp_rank * layer.input_size_per_partition if is_term else 0
        part = slice(start, start + layer.input_size_per_partition) if is_term else slice(None)
        values, dtype = self._through(vectors, layer, width, part)
        bias = getattr(layer, "bias", None)
        for piece in parts:
            mark = Mark(values[:, piece.local], width, dtype)
            yield f"{piece.name}.weight", Shard(mark, piece.rows, piece.offset, is_term)
            if bias is not None:
                own = mark_of(bias[piece.local], vectors)
                yield f"{piece.name}.bias", Shard(own, piece.rows, 0 if is_term else piece.offset)

    def _vocabulary(self, vectors: Vectors, layer: Any, name: str, as_head: bool) -> Iterator[tuple[str, Shard]]:
        """An embedding as it is looked up, or a head as it makes logits; rows that only fill up are left out."""
        indices = layer.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        if as_head or not layer.weight.numel():
            values, dtype = self._through(vectors, layer, layer.embedding_dim, slice(None))
            mark = Mark(values[:, : end - start], layer.embedding_dim, dtype)
        else:
            mark = mark_of(layer.weight[: end - start], vectors)
        yield name, Shard(mark, layer.org_vocab_size, start)

    def _through(self, vectors: Vectors, layer: Any, width: int, part: slice) -> tuple[np.ndarray, str]:
        """What a layer makes of the vectors without its bias, [1 + columns, rows], and the type it computes in."""
        weight = layer.weight
        dtype = weight.dtype if weight.numel() else self.dtype
        inputs = vectors.inputs(width, dtype, next(self.model.parameters()).device)
        if part != slice(None):
            inputs = inputs[:, part].contiguous()
        values = layer.quant_method.apply(layer, inputs, bias=None)
        return as_array(values), dtype_name(values.dtype)

    def _own(
        self, vectors: Vectors, module: nn.Module, name: str, skip: tuple[str, ...]
    ) -> Iterator[tuple[str, Shard]]:
        """The parameters of a module that is no layer of its own kind: norms and the like, whole on every rank."""
        for key, weight in module._parameters.items():
            if weight is not None and key not in skip:
                yield f"{name}.{key}", whole(mark_of(weight, vectors))


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
