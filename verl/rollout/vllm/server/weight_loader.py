"""Loads streamed tensors in place into the engine's layers, without a reload by vLLM. Destinations are computed once.

    q_proj, k_proj, v_proj ──> rows of qkv_proj ──┬── plain parameter (on a GPU, embeddings, norms): copied
    gate_proj, up_proj     ──> rows of gate_up    └── packed for the CPU: packed again from adjacent tensors of the
    chunk

A packed layer frees its old buffer before it allocates the new one, and free memory is returned to the system after
each load. Layers are recognised by class name, as in weight verification, which reads every layer after each load; for
a layer of another class `UnsupportedLayer` is raised, and `WorkerExtension` has vLLM reload the weights.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.ops.resharding.layout import Box
from verl.rollout.proof.fingerprints import plain_name
from verl.rollout.vllm.server.layer_fingerprints import (
    EXPERTS,
    PACKED,
    engine_names,
    head_of,
    kinds_of,
    layer_rows,
)
from verl.rollout.weight_sync.stream import ChunkEntry

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
OWN_STATE = ("MLAAttention",)  # its buffers are computed from weights at loading
OTHER_STAGE = "PPMissingLayer"  # a layer that another pipeline stage holds
Shape = tuple[int, ...]


class UnsupportedLayer(Exception):
    """A layer that can only be loaded by vLLM itself; names the layer."""


Slices = tuple[slice, ...]


class PackedLayer:
    """A layer with a packed matrix, and the parts of it that have been received.

    Args:
        pieces: the tensors that it consists of, in the order of its rows, and where each is in what is received.
    """

    def __init__(self, layer: Any, pieces: Sequence[tuple[str, Slices]]):
        self.layer, self.pieces = layer, pieces
        self.taken: dict[int, Tensor] = {}  # by the number of the piece

    def take(self, name: str, tensor: Tensor) -> None:
        """Store the layer's part of a tensor; after the last part the layer is packed."""
        self.taken |= {i: tensor[read] for i, (own, read) in enumerate(self.pieces) if own == name}
        if len(self.taken) == len(self.pieces):
            pack_weight(self.layer, concatenate_views([self.taken.pop(i) for i in range(len(self.pieces))]))

    def keep(self) -> None:
        """Copy parts that still point into the chunk."""
        self.taken = {i: part.clone() for i, part in self.taken.items()}


class InPlaceLoader:
    """Destinations of all tensors of a stream.

    Args:
        model: vLLM's model, with or without weights.
        shapes: shapes of the tensors by name.
        starts: for each tensor that is received as a slice, the start of the slice in the whole tensor.
    Raises:
        UnsupportedLayer: a layer is of an unknown kind, or a tensor has no destination and is of no other pipeline
            stage.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Shape], starts: Mapping[str, Shape] | None = None):
        self._names = engine_names(model, shapes)
        shapes, starts = ({self._names[name]: x for name, x in given.items()} for given in (shapes, starts or {}))
        self._starts, self._slices = starts, dict[str, list[Slices]]()
        self._packed_names = PACKED | dict(getattr(model, "packed_modules_mapping", None) or {})
        self._shapes = shapes
        self._copies: dict[str, list[tuple[Tensor, Slices]]] = {name: [] for name in shapes}  # targets, and what of it
        self._packed: list[PackedLayer] = []
        self._packings: dict[str, list[PackedLayer]] = {name: [] for name in shapes}  # that a tensor is a part of
        self._after: dict[str, list[Callable[[], None]]] = {name: [] for name in shapes}  # once a tensor is there
        self._arriving = torch.empty(0)  # a packed tensor that comes by its rows
        self._embeddings: dict[int, str] = {}  # of a parameter: the name that it comes by
        modules = dict(model.named_modules())
        for path, module in modules.items():
            self._find(plain_name(path), module)
        self._register_head_copies(modules.values(), head_of(model))
        elsewhere = tuple(f"{plain_name(path)}." for path, part in modules.items() if OTHER_STAGE in kinds_of(part))
        unmatched = [name for name in shapes if name not in self._slices and not name.startswith(elsewhere)]
        if unmatched:
            raise UnsupportedLayer(f"{unmatched[0]} has no place")

    def wanted(self) -> dict[str, Box]:
        """Smallest slice of each tensor that contains everything this rank loads."""
        names = {own: name for name, own in self._names.items()}
        return {names[own]: _bounding_slice(slices, self._shapes[own]) for own, slices in self._slices.items()}

    @torch.no_grad()
    def take(self, entry: ChunkEntry, tensor: Tensor) -> None:
        """Load a tensor, or some rows of one; it may be a view that is valid until `keep`."""
        packings = self._packings[name := self._names[entry.name]]
        for target, read in self._copies[name]:
            if entry.whole is None:
                target.copy_(tensor[read])
            else:
                copy_rows(target, read, tensor, entry.begin)
        if packings and entry.whole is not None:
            if entry.begin == 0:
                self._arriving = tensor.new_empty(entry.whole)
            self._arriving[entry.begin : entry.begin + len(tensor)] = tensor
            tensor = self._arriving
        if entry.is_last:
            for packing in packings:
                packing.take(name, tensor)
            for follow in self._after[name]:
                follow()
            self._arriving = torch.empty(0)

    def keep(self) -> None:
        """Copy parts of incomplete layers, because the memory that they point to will be reused."""
        for packing in self._packed:
            packing.keep()

    def _find(self, name: str, module: Any) -> None:
        kinds = kinds_of(module)
        if kinds & {*EXPERTS, *OWN_STATE}:
            raise UnsupportedLayer(f"{name} is a {type(module).__name__}")
        if kinds & {"LinearBase", "VocabParallelEmbedding"}:
            if (method := type(module.quant_method).__name__) not in PLAIN_METHODS:
                raise UnsupportedLayer(f"{name} is loaded by {method}")
            (self._vocabulary if "VocabParallelEmbedding" in kinds else self._linear)(name, module, kinds)
        else:
            self._whole(name, module._parameters)

    def _linear(self, name: str, layer: Any, kinds: set[str]) -> None:
        """A layer of one or more matrices, of which this rank holds some rows or some columns."""
        is_cut = "RowParallelLinear" in kinds and layer.tp_size > 1
        width = layer.input_size_per_partition if is_cut else 0
        columns = (slice(layer.tp_rank * width, (layer.tp_rank + 1) * width),) if is_cut else ()
        pieces = []  # name, position in the whole tensor, rows of the layer
        for part in layer_rows(layer, name, kinds, self._packed_names):
            tensor, bias = f"{part.name}.weight", f"{part.name}.bias"
            self._expect(tensor, (part.rows, layer.input_size))
            held = part.local.stop - part.local.start
            rows = slice(0, part.rows) if is_cut else slice(part.offset, part.offset + held)
            pieces.append((tensor, (rows, *columns), part.local))
            if layer.bias is not None:
                self._expect(bias, (part.rows,))
                self._register_copy(bias, (rows,), layer.bias.data[part.local])
        self._matrix(layer, sorted(pieces, key=lambda piece: piece[2].start))
        set_parameters = [key for key, value in layer._parameters.items() if value is not None]
        if others := [key for key in set_parameters if key not in ("weight", "bias")]:
            raise UnsupportedLayer(f"{name} has a parameter {others[0]}")

    def _matrix(self, layer: Any, pieces: Sequence[tuple[str, Slices, slice]]) -> None:
        if layer.weight.numel():
            for name, source, rows in pieces:
                self._register_copy(name, source, layer.weight.data[rows])
            return
        packing = PackedLayer(layer, [(name, self._moved(name, source)) for name, source, _ in pieces])
        self._packed.append(packing)
        for name, source, _ in pieces:
            if packing not in self._packings[name]:
                self._packings[name].append(packing)
            self._slices.setdefault(name, []).append(source)

    def _vocabulary(self, name: str, layer: Any, kinds: set[str]) -> None:
        """Rows of the vocabulary; padding rows are not modified."""
        tensor, indices = f"{name}.weight", layer.shard_indices
        if id(layer.weight) in self._embeddings:  # a head that is tied to the embedding
            return
        self._expect(tensor, (layer.org_vocab_size, layer.embedding_dim))
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        self._embeddings[id(layer.weight)] = tensor
        self._register_copy(tensor, (slice(start, end),), layer.weight.data[: end - start])
        self._whole(name, {key: value for key, value in layer._parameters.items() if key != "weight"})

    def _register_head_copies(self, modules: Any, head: Any) -> None:
        """On a CPU, output heads have a packed copy of their weight; embeddings have one too, which is never read."""
        for layer in modules:
            if "VocabParallelEmbedding" not in (kinds := kinds_of(layer)) or not hasattr(layer, "cpu_linear"):
                continue
            if "ParallelLMHead" in kinds or layer is head:
                self._after[self._embeddings[id(layer.weight)]].append(functools.partial(repack_weight, layer))
            else:
                layer.cpu_linear = torch.nn.functional.linear

    def _whole(self, name: str, parameters: Mapping[str, Tensor | None]) -> None:
        """Parameters that every rank holds whole, such as norms."""
        for key, parameter in parameters.items():
            if parameter is not None:
                self._expect(f"{name}.{key}", tuple(parameter.shape))
                self._register_copy(f"{name}.{key}", (), parameter.data)

    def _expect(self, name: str, shape: Shape) -> None:
        if self._shapes.get(name) != shape:
            raise UnsupportedLayer(f"{name} does not come as {list(shape)}")

    def _register_copy(self, name: str, source: Slices, target: Tensor) -> None:
        self._slices.setdefault(name, []).append(source)
        self._copies[name].append((target, self._moved(name, source)))

    def _moved(self, name: str, source: Slices) -> Slices:
        """Position of a slice of the whole tensor in the received slice."""
        if name not in self._starts:
            return source
        moved = zip(source, self._starts[name], strict=False)
        return tuple(slice(part.start - start, part.stop - start) for part, start in moved)


def copy_rows(target: Tensor, read: Slices, rows: Tensor, begin: int) -> None:
    """Copy to `target` the part of the slice `read` that the given rows, starting at row `begin`, contain."""
    span = read[0] if read else slice(0, len(target))
    low, high = max(span.start, begin), min(span.stop, begin + len(rows))
    if low < high:
        part = rows[(slice(low - begin, high - begin), *read[1:])]
        target[low - span.start : high - span.start].copy_(part)


def pack_weight(layer: Any, weight: Tensor) -> None:
    """Pack a matrix as vLLM does after loading. The old packed buffer is freed first."""
    held, layer.cpu_linear = layer.weight, None
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    layer.weight = held


def repack_weight(layer: Any) -> None:
    """Pack a weight's CPU copy again from its current value."""
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)


def give_back_free_memory() -> None:
    """Return free heap memory to the system (`malloc_trim`).

    glibc keeps freed blocks, and packed weights need aligned memory that does not fit into the blocks they freed, so an
    engine would grow by several layers over the first syncs. No effect with other C libraries.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def concatenate_views(parts: Sequence[Tensor]) -> Tensor:
    """Matrices stacked along the rows: a view if they are adjacent in memory, otherwise a copy."""
    first, end, storage = parts[0], parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return torch.cat(tuple(parts))
        end += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _bounding_slice(slices: Sequence[Slices], shape: Shape) -> Box:
    """The smallest slice that contains all of these."""
    box = [(0, size) for size in shape]
    for axis in range(min(map(len, slices))):
        box[axis] = min(s[axis].start for s in slices), max(s[axis].stop for s in slices)
    return tuple(box)
