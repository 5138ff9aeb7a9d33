"""Fingerprints of every tensor: products of a matrix with a few probe vectors, equal on both sides if the weights are.

Engines re-pack their weights, so only products W x of a layer can be read. Two kinds of x are used:

    signs     x_j = +-1        exact in every type, so W x differs only by rounding of the sum; covers every entry
    columns   x = e_j          W x is column j, bit by bit

A missing sync changes every column, even for small steps; a fault in a part of a matrix is detected by the signs and
by one column in each quarter. The columns advance with every sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.ops.resharding.layout import Box
from verl.ops.sampling import uniform

COLUMNS = 4  # one in each quarter of the width
_SEED = 0x5EED


@dataclass(frozen=True)
class ProbeVectors:
    """The vectors of the sync `version`.

    They depend only on the width of a layer, so that a tensor loaded in place of another of the same shape is
    recognised.
    """

    version: int = 0

    def columns(self, width: int) -> tuple[int, ...]:
        """The columns to read: at most `COLUMNS`, each advancing through its part of the width from sync to sync."""
        count = min(COLUMNS, width)
        bounds = [width * part // count for part in range(count + 1)]
        return tuple(low + self.version % (high - low) for low, high in pairwise(bounds))

    def signs(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        """[width] of +-1, float32, the same in every sync."""
        return _signs(width, torch.device(device))

    def inputs(self, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """[1 + columns, width]: the signs, then a unit vector for each column."""
        return _inputs(self.columns(width), width, dtype, torch.device(device))


@lru_cache(maxsize=32)
def _inputs(columns: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Probe vectors of one width, cached for this sync."""
    rows = torch.zeros(1 + len(columns), width)
    rows[0] = _signs(width, torch.device("cpu"))
    rows[range(1, len(rows)), columns] = 1.0
    return rows.to(device, dtype)


@lru_cache(maxsize=64)
def _signs(width: int, device: torch.device) -> Tensor:
    noise = uniform(_SEED, 0, torch.arange(width), torch.tensor(0), torch.tensor(0))
    return torch.where(noise < 0.5, -1.0, 1.0).to(device)


@lru_cache(maxsize=64)
def _numbers(columns: tuple[int, ...], device: torch.device) -> Tensor:
    """Columns of one width in this sync, copied to a device once."""
    return torch.tensor(columns, device=device)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Context in which float32 products are computed in float32, not in a narrower type such as TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_CHUNK = 1 << 21  # entries cast at a time: as many as stay in a cache
_CHUNK_ON_DEVICE = 1 << 24  # each chunk is a launch or three


@dataclass(frozen=True)
class WeightFingerprint:
    """Fingerprint of one tensor, or of the part of it that one rank holds.

    Attributes:
        values: float32. Of a matrix [1 + columns, rows]: its product with the signs, then its columns. Of a vector
            [1, n]: itself. More than two dimensions count as rows, but for the last.
        width: entries of a row, or None for a vector.
        dtype: data type of the tensor, such as `bfloat16`.
        slack: allowed relative difference of values that are otherwise compared bit by bit.
        rows: number of rows of the whole tensor, of which this is a part; None: this is the whole tensor.
        offset: row at which the part begins.
        is_term: the values are sums over the rank's columns, to be added over ranks.
    """

    values: np.ndarray
    width: int | None
    dtype: str
    slack: float = 0.0
    rows: int | None = None
    offset: int = 0
    is_term: bool = False

    def part_of(self, rows: int, offset: int = 0, is_term: bool = False) -> WeightFingerprint:
        """The same as a part of a tensor with this number of rows."""
        return replace(self, rows=rows, offset=offset, is_term=is_term)


Fingerprints = dict[str, WeightFingerprint]
FingerprintParts = dict[str, list[WeightFingerprint]]  # of one rank; a fused layer gives several of one tensor


@torch.no_grad()
def fingerprint(
    tensor: Tensor, vectors: ProbeVectors, dtype: torch.dtype | None = None, slack: float = 0.0
) -> WeightFingerprint:
    """The fingerprint of a tensor in an engine's `dtype`; None: the tensor's own."""
    tensor, dtype = tensor.detach(), dtype or tensor.dtype
    name = dtype_name(dtype)
    if tensor.dim() < 2:
        own = tensor.to(dtype, copy=True).reshape(1, -1)  # the next update changes the tensor in place
        return WeightFingerprint(as_array(own), None, name, slack)
    rows = tensor.reshape(-1, tensor.shape[-1])
    width = rows.shape[1]
    columns = _numbers(vectors.columns(width), tensor.device)
    values = torch.empty(1 + len(columns), len(rows), device=tensor.device)
    values[1:] = rows.index_select(1, columns).T.to(dtype)
    _times(rows, vectors.signs(width, tensor.device), dtype, values[0])
    return WeightFingerprint(as_array(values), width, name, slack)


def _times(rows: Tensor, signs: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """rows x signs [n], summed in float32; casts are made in chunks."""
    with full_precision():
        if rows.dtype == dtype == torch.float32:
            torch.mv(rows, signs, out=out)
            return
        size = max(1, (_CHUNK if rows.device.type == "cpu" else _CHUNK_ON_DEVICE) // rows.shape[1])
        for part, own in zip(rows.split(size), out.split(size), strict=True):
            torch.mv(part.to(dtype).float(), signs, out=own)


class HostCopies:
    """Copies of small tensors from a device to main memory, all in one transfer.

    Inside of `with copies:` `as_array` gives arrays of nan, which `finish` fills.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, np.ndarray]] = []
        self._tokens: list[Token[HostCopies | None]] = []

    def __enter__(self) -> HostCopies:
        self._tokens.append(_copies.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _copies.reset(self._tokens.pop())

    def add(self, x: Tensor) -> np.ndarray:
        """The array [as x] that will have the numbers of a float32 tensor."""
        array = np.full(x.shape, np.nan, dtype=np.float32)
        self._waiting.append((x, array))
        return array

    def finish(self) -> None:
        """Copy what was added since the last call."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            numbers = torch.cat([x.reshape(-1) for x, _ in waiting]).cpu().numpy()
            ends = np.cumsum([array.size for _, array in waiting])
            for (_, array), part in zip(waiting, np.split(numbers, ends[:-1]), strict=True):
                array[...] = part.reshape(array.shape)


_copies: ContextVar[HostCopies | None] = ContextVar("_copies", default=None)


def as_array(x: Tensor) -> np.ndarray:
    """A float32 array in main memory; exact for float16 and bfloat16. Filled later inside of `HostCopies`."""
    x, copies = x.detach().float(), _copies.get()
    return x.cpu().numpy() if copies is None or is_in_main_memory(x) else copies.add(x)


def is_in_main_memory(x: Tensor) -> bool:
    return x.device.type == "cpu"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tied_names(model: Any) -> dict[str, str]:
    """Further names of shared tensors -> first name, for example of a head that is tied to the embedding."""
    first: dict[int, str] = {}
    tied = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        name = plain_name(path)
        source = first.setdefault(id(weight), name)
        if source != name:
            tied[name] = source
    return tied


def transposed_names(model: Any) -> set[str]:
    """Names of matrices that a model keeps as [in, out] (transformers' Conv1D, in GPT-2), and engines as [out, in]."""
    conv1d = ("transformers.pytorch_utils", "Conv1D")
    bases = {path: [(x.__module__, x.__name__) for x in type(module).__mro__] for path, module in model.named_modules()}
    return {f"{plain_name(path)}.weight" for path, names in bases.items() if conv1d in names}


def plain_name(path: str) -> str:
    """The name of a module or tensor without the prefixes of adapter wrappers."""
    path = path.removeprefix("base_model.model.")
    return ".".join(part for part in path.split(".") if part != "base_layer")


def join_parts(ranks: Sequence[FingerprintParts]) -> Fingerprints:
    """The fingerprints of whole tensors from the parts of all ranks.

    Rows that no rank holds, and rows that differ between ranks, are nan, so that they match nothing.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: _joined([part for rank in ranks for part in rank.get(name, ())]) for name in names}


def _joined(parts: Sequence[WeightFingerprint]) -> WeightFingerprint:
    first = parts[0]
    rows = first.values.shape[1] if first.rows is None else first.rows
    if len(parts) == 1 and first.values.shape[1] == rows:
        return first
    if first.is_term:
        parts = list(_sums(parts))
    values = np.full((len(first.values), rows), np.nan, dtype=np.float32)
    is_filled = np.zeros(rows, dtype=bool)
    for part in parts:
        own = slice(part.offset, part.offset + part.values.shape[1])
        both = is_filled[own] & (values[:, own] != part.values).any(axis=0)
        values[:, own] = np.where(both, np.nan, part.values)
        is_filled[own] = True
    return replace(first, values=values)


def _sums(parts: Sequence[WeightFingerprint]) -> Iterator[WeightFingerprint]:
    """Add the partial sums of each range of rows."""
    ranges: dict[tuple[int, int], list[WeightFingerprint]] = {}
    for part in parts:
        ranges.setdefault((part.offset, part.values.shape[1]), []).append(part)
    for terms in ranges.values():
        yield replace(terms[0], values=np.sum([term.values for term in terms], axis=0, dtype=np.float32))


@torch.no_grad()
def own_part(
    part: Tensor, box: Box, shape: Sequence[int], vectors: ProbeVectors, dtype: torch.dtype
) -> WeightFingerprint:
    """The fingerprint of the part at `box` of a vector or matrix of this shape, in an engine's `dtype`."""
    if len(shape) < 2:
        return fingerprint(part, vectors, dtype).part_of(shape[0] if shape else 1, box[0][0] if box else 0)
    (first, last), (left, right) = box
    if (left, right) == (0, shape[1]):
        return fingerprint(part, vectors, dtype).part_of(shape[0], first)
    inputs = vectors.inputs(shape[1], torch.float32, part.device)[:, left:right]
    values = torch.zeros(len(inputs), last - first, device=part.device)
    rounded = part.detach().to(dtype).float()
    with full_precision():
        torch.mv(rounded, inputs[0].contiguous(), out=values[0])
    for value, column in zip(values[1:], vectors.columns(shape[1]), strict=True):
        if left <= column < right:
            value.copy_(rounded[:, column - left])
    return WeightFingerprint(as_array(values), shape[1], dtype_name(dtype)).part_of(shape[0], first, True)


def own_parts(
    parts: Mapping[str, tuple[Tensor, Box, Sequence[int]]], vectors: ProbeVectors, dtype: torch.dtype
) -> dict[str, WeightFingerprint]:
    """`own_part` of several tensors. On a device all vectors are computed together, and matrices of one width: starting
    kernels for each tensor takes longer than reading it."""
    marks: dict[str, WeightFingerprint] = {}
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, (part, box, shape) in parts.items():
        if len(shape) in (1, 2) and box[1:] == tuple((0, n) for n in shape[1:]) and not is_in_main_memory(part):
            groups.setdefault(tuple(shape[1:]), []).append(name)
        else:
            marks[name] = own_part(part, box, shape, vectors, dtype)
    for names in groups.values():
        tensors, begin = [parts[name][0] for name in names], 0
        mark = fingerprint(tensors[0] if len(tensors) == 1 else torch.cat(tensors), vectors, dtype)
        for name, tensor in zip(names, tensors, strict=True):
            _, box, shape = parts[name]
            own, begin = slice(begin, begin + len(tensor)), begin + len(tensor)
            marks[name] = replace(mark, values=mark.values[:, own]).part_of(shape[0], box[0][0])
    return marks


def transpose_to_out_in(part: Tensor, box: Box, shape: Sequence[int]) -> tuple[Tensor, Box, tuple[int, ...]]:
    """Transpose a part of a matrix from [in, out] to [out, in]."""
    return part.T, (box[1], box[0]), (shape[1], shape[0])


LORA_A, LORA_B = "lora_A", "lora_B"


def adapter_tensors(model: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each A [rank, in] and each scaled B [out, rank] of a peft model, by the name of its layer.

    Args:
        tensors: of the adapter, whole, by their names in the model.
    """
    adapter = model.active_adapter
    for path, module in model.named_modules():
        if adapter in getattr(module, LORA_A, {}):
            name, (a, b) = plain_name(path), (tensors[f"{path}.{x}.{adapter}.weight"] for x in (LORA_A, LORA_B))
            yield f"{name}.{LORA_A}", a
            yield f"{name}.{LORA_B}", b * module.scaling[adapter]
