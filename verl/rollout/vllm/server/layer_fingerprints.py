"""Fingerprints of a vLLM model's parameters, taken through its layers, under the names of the Hugging Face model.

    q_proj, k_proj, v_proj  <── qkv_proj        one product, cut into the rows of each
    gate_proj, up_proj      <── gate_up_proj
    lm_head                 <── lm_head, or the embedding where the two are tied: as the sampler reads it
    norms, biases           <── themselves
    experts.E.gate_proj     <── w13_weight[E], its upper half
    experts.E.up_proj       <── w13_weight[E], its lower half
    experts.E.down_proj     <── w2_weight[E]

CPU kernels for experts keep the entries of a matrix in another order, which is found by packing numbers as weights are
packed. Kernels that change more than the order are left to the log-prob probe.

Runs in the engine's processes, one rank at a time. Layers are recognised by class name, so vLLM is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from verl.rollout.proof.fingerprints import (
    LORA_A,
    LORA_B,
    FingerprintParts,
    HostCopies,
    ProbeVectors,
    WeightFingerprint,
    as_array,
    dtype_name,
    fingerprint,
    full_precision,
    plain_name,
)
from verl.utils.progress import report

IN_ORDER = ("TRITON", "BATCHED_TRITON")  # kernels that take weights as they are loaded
PACKED_EXPERTS = "CPU"
BLOCK = 32  # rows that are packed among themselves
DIGITS = 3  # of base 256, which every type holds exactly


class ExpertFingerprints:
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

    def fingerprints(self, vectors: ProbeVectors) -> Iterator[tuple[str, WeightFingerprint]]:
        """The fingerprints of every expert's matrices, unpacked one expert at a time."""
        layer, width = self.layer, self.config.hidden_dim_unpadded
        own, ranks = self.config.intermediate_size_per_partition_unpadded, self.config.tp_size
        rows, offset, kind = own * ranks, own * self.config.tp_rank, _packing(layer)
        for number, place in self.numbers:
            packed_parts = layer.w13_weight[place], layer.w2_weight[place]
            both, down = packed_parts if kind is None else (unpacked(w, kind) for w in packed_parts)
            half = len(both) // 2
            for part, matrix in ((layer.ckpt_gate_proj_name, both[:half]), (layer.ckpt_up_proj_name, both[half:])):
                mark = fingerprint(matrix[:own, :width], vectors).part_of(rows, offset)
                yield f"{self.name}.{number}.{part}.weight", mark
            shown = widened(down[:width, :own], rows, offset) if ranks > 1 else down[:width, :own]
            mark = fingerprint(shown, vectors).part_of(width, is_term=ranks > 1)
            yield f"{self.name}.{number}.{layer.ckpt_down_proj_name}.weight", mark


def reader_of(runner: Any, name: str) -> ExpertFingerprints | None:
    """A reader for a module with a layer of experts; None if it cannot be read."""
    layers = [m for m in runner.modules() if "RoutedExperts" in {kind.__name__ for kind in type(m).__mro__}]
    if len(layers) != 1 or not _is_plain(layers[0]):
        return None
    reader = ExpertFingerprints(layers[0], name)
    return reader if _packing(layers[0]) is None or _is_undone(layers[0]) else None


def _is_plain(layer: Any) -> bool:
    """Whether each expert consists of exactly three matrices, in a kernel that at most reorders their entries."""
    method, config = layer.quant_method, layer.moe_config
    if type(method).__name__ != "UnquantizedFusedMoEMethod" or config.has_bias or not config.is_act_and_mul:
        return False
    backend, experts = method.unquantized_backend.name, getattr(method.moe_kernel, "fused_experts", None)
    is_known = backend in IN_ORDER or (backend == PACKED_EXPERTS and getattr(experts, "_use_zentorch", None) is False)
    is_even = config.intermediate_size_per_partition_unpadded * config.tp_size == config.intermediate_size
    return is_known and is_even and not config.moe_parallel_config.enable_eplb


def _packing(layer: Any) -> str | None:
    """The packing of vLLM's CPU kernel; None for unpacked weights."""
    method = layer.quant_method
    return method.moe_kernel.fused_experts.isa if method.unquantized_backend.name == PACKED_EXPERTS else None


def _is_undone(layer: Any) -> bool:
    """Whether packing the unpacked matrix again reproduces the kernel's content, checked for the first expert."""
    kind = _packing(layer)
    assert kind is not None
    weights = (layer.w13_weight[0], layer.w2_weight[0])
    return all(len(w) % BLOCK == 0 and torch.equal(packed(unpacked(w, kind), kind), w) for w in weights)


def packed(weight: Tensor, kind: str) -> Tensor:
    """A matrix as vLLM packs it."""
    result = torch.empty_like(weight)
    torch.ops._C.prepack_moe_weight(weight[None].contiguous(), result[None], kind)
    return result


def unpacked(weight: Tensor, kind: str) -> Tensor:
    """A matrix as it was before."""
    order = _order(kind, weight.shape[1], weight.dtype)
    return weight.reshape(-1, len(order)).index_select(1, order).view(weight.shape)


@lru_cache(maxsize=8)
def _order(kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Position of each entry of a block of rows after packing."""
    numbers = torch.arange(BLOCK * width)
    digits = [(numbers >> 8 * digit & 255).to(dtype).view(BLOCK, width) for digit in range(DIGITS)]
    went = sum(packed(digit, kind).flatten().long() << 8 * number for number, digit in enumerate(digits))
    assert isinstance(went, Tensor)
    return went.argsort()


def widened(matrix: Tensor, width: int, offset: int) -> Tensor:
    """This rank's columns at their global positions, with zeros for those of other ranks."""
    wide = matrix.new_zeros(len(matrix), width)
    wide[:, offset : offset + matrix.shape[1]] = matrix
    return wide


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD = "lm_head.weight"
EXPERTS = ("FusedMoE", "MoERunner")


class LayerRows(NamedTuple):
    """The rows of one Hugging Face tensor within a layer of the engine.

    Attributes:
        name: of the tensor's module.
        local: its rows in the output of this rank's layer.
        rows, offset: number of rows of the whole tensor, and first row of this rank's part.
    """

    name: str
    local: slice
    rows: int
    offset: int


Reading = Callable[[ProbeVectors], Iterable[tuple[str, WeightFingerprint]]]  # of one layer


class LayerFingerprints:
    """One rank's part of the model; layers are looked up once and read at every sync.

    Args:
        model: vLLM's.
        dtype: that the engine computes in.
        names: of the tensors in the Hugging Face model.
    Attributes:
        unproven: name prefixes of tensors that cannot be read.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, names: Iterable[str] = ()):
        self.model, self.dtype = model, dtype
        self._names = {own: name for name, own in engine_names(model, names).items()}
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
                if (reader := reader_of(module, name)) is None:
                    self.unproven.append(experts)
                else:
                    self._readings.append(reader.fingerprints)
            elif "ParallelLMHead" in kinds:
                self._add(self._vocabulary, module, f"{name}.weight", True)
                self._add(self._own, module, name, ("weight",))
            elif "VocabParallelEmbedding" in kinds:
                embedding = embedding or module
                self._add(self._vocabulary, module, f"{name}.weight", False)
            elif "LinearBase" in kinds:
                is_term = "RowParallelLinear" in kinds and layer.tp_size > 1
                self._add(self._linear, module, list(layer_rows(module, name, kinds, self.packed)), is_term)
            elif module._parameters:
                self._add(self._own, module, name, ())
        if embedding is not None and self._reads_as_head(embedding):
            self._add(self._vocabulary, embedding, HEAD, True)

    @torch.no_grad()
    def parts(self, vectors: ProbeVectors) -> FingerprintParts:
        """The fingerprints of this rank's part of every tensor by its name, for the vectors of a sync."""
        parts: FingerprintParts = {}
        with full_precision(), HostCopies() as copies:
            for reading in self._readings:
                report()
                for name, mark in reading(vectors):
                    parts.setdefault(self._names.get(name, name), []).append(mark)
        copies.finish()
        return parts

    def _add(self, read: Callable[..., Iterator[tuple[str, WeightFingerprint]]], *of: Any) -> None:
        self._readings.append(lambda vectors: read(vectors, *of))

    def _reads_as_head(self, embedding: nn.Module) -> bool:
        if heads := [module.lm_head for module in self.model.modules() if hasattr(module, "lm_head")]:
            return heads[0] is embedding
        return not any("ParallelLMHead" in kinds_of(module) for module in self.model.modules())

    def _linear(
        self, vectors: ProbeVectors, layer: Any, parts: list[LayerRows], is_term: bool
    ) -> Iterator[tuple[str, WeightFingerprint]]:
        width = layer.input_size
        start = layer.tp_rank * layer.input_size_per_partition if is_term else 0
        part = slice(start, start + layer.input_size_per_partition) if is_term else slice(None)
        values, dtype = self._through(vectors, layer, width, part)
        bias = getattr(layer, "bias", None)
        for piece in parts:
            mark = WeightFingerprint(values[:, piece.local], width, dtype)
            yield f"{piece.name}.weight", mark.part_of(piece.rows, piece.offset, is_term)
            if bias is not None:
                own = fingerprint(bias[piece.local], vectors)
                yield f"{piece.name}.bias", own.part_of(piece.rows, 0 if is_term else piece.offset)

    def _vocabulary(
        self, vectors: ProbeVectors, layer: Any, name: str, as_head: bool
    ) -> Iterator[tuple[str, WeightFingerprint]]:
        """Rows of an embedding (by look-up) or a head (by its logits), without padding rows."""
        indices = layer.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        if as_head or not layer.weight.numel():
            values, dtype = self._through(vectors, layer, layer.embedding_dim, slice(None))
            mark = WeightFingerprint(values[:, : end - start], layer.embedding_dim, dtype)
        else:
            mark = fingerprint(layer.weight[: end - start], vectors)
        yield name, mark.part_of(layer.org_vocab_size, start)

    def _through(self, vectors: ProbeVectors, layer: Any, width: int, part: slice) -> tuple[np.ndarray, str]:
        """Output of a layer for the vectors, without bias, [1 + columns, rows], and its compute type."""
        weight = layer.weight
        dtype = weight.dtype if weight.numel() else self.dtype
        inputs = vectors.inputs(width, dtype, next(self.model.parameters()).device)
        if part != slice(None):
            inputs = inputs[:, part].contiguous()
        values = layer.quant_method.apply(layer, inputs, bias=None)
        return as_array(values), dtype_name(values.dtype)

    def _own(
        self, vectors: ProbeVectors, module: nn.Module, name: str, skip: tuple[str, ...]
    ) -> Iterator[tuple[str, WeightFingerprint]]:
        """Parameters of other modules, such as norms, which every rank holds whole."""
        for key, weight in module._parameters.items():
            if weight is not None and key not in skip:
                yield f"{name}.{key}", fingerprint(weight, vectors)


def layer_rows(layer: Any, name: str, kinds: set[str], packed: dict[str, list[str]]) -> Iterator[LayerRows]:
    """The Hugging Face tensors within a linear layer, in its order."""
    pieces = _pieces(layer, kinds)
    parent, _, last = name.rpartition(".")
    names = [f"{parent}.{part}" if parent else part for part in packed.get(last, [last])]
    is_fused = len(names) != len(pieces)  # fused in the Hugging Face model too
    here = before = 0
    for index, (total, local, place) in enumerate(pieces):
        rows, offset = slice(here, here + local), place * local
        if is_fused:
            yield LayerRows(names[0], rows, sum(piece[0] for piece in pieces), before + offset)
        else:
            yield LayerRows(names[index], rows, total, offset)
        here, before = here + local, before + total


def _pieces(layer: Any, kinds: set[str]) -> list[tuple[int, int, int]]:
    """Number of rows, rows on this rank, and index of the part, for each tensor of a packed layer."""
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


def head_of(model: nn.Module) -> Any:
    """The output head of a model, or of the language model in it; None if it has no attribute for one."""
    return next((module.lm_head for module in model.modules() if hasattr(module, "lm_head")), None)


def engine_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """vLLM's names of tensors by their Hugging Face names: an image-text model has other prefixes there."""
    prefixes = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", None) or {}
    found = {}
    for name in names:
        before = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        found[name] = f"{prefixes.get(before, '')}{name.removeprefix(before)}"
    return found


def kinds_of(module: nn.Module) -> set[str]:
    """The names of a module's classes."""
    return {kind.__name__ for kind in type(module).__mro__}


@torch.no_grad()
def adapter_parts(manager: Any, adapter_id: int, rank: int, vectors: ProbeVectors) -> FingerprintParts:
    """One engine rank's part of the adapter, read from vLLM's manager of adapters; empty if it is not in use.

    Args:
        manager: vLLM's LoRAModelManager.
        adapter_id: `lora_int_id` of the request.
        rank: of the adapter; the engine's own may be larger.
    """
    if adapter_id not in manager.lora_index_to_id:
        return {}
    slot = manager.lora_index_to_id.index(adapter_id)
    packed = PACKED | dict(getattr(manager.model, "packed_modules_mapping", None) or {})
    parts: FingerprintParts = {}
    for path, module in manager.modules.items():
        layer = getattr(module, "base_layer", None)
        if layer is None or "LinearBase" not in kinds_of(layer):
            continue
        is_term = "RowParallelLinear" in kinds_of(layer) and layer.tp_size > 1
        for index, part in enumerate(layer_rows(layer, plain_name(path), kinds_of(layer), packed)):
            is_fused = len(module.lora_a_stacked) == 1  # one adapter over all parts
            a = module.lora_a_stacked[0 if is_fused else index][slot, 0, :rank]
            b = module.lora_b_stacked[0 if is_fused else index][slot, 0, :, :rank]
            shown = widened(a, layer.input_size, layer.tp_rank * a.shape[1]) if is_term else a
            b_part = b[part.local] if is_fused else b
            mark_a = fingerprint(shown, vectors).part_of(rank, is_term=is_term)
            mark_b = fingerprint(b_part, vectors).part_of(part.rows, 0 if is_term else part.offset)
            parts.setdefault(f"{part.name}.{LORA_A}", []).append(mark_a)
            parts.setdefault(f"{part.name}.{LORA_B}", []).append(mark_b)
    return parts
