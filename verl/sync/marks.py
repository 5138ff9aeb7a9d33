"""The mark of a tensor: what it makes of the vectors of a sync, a few numbers for each of its rows."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.sync.vectors import Vectors, full_precision

_CHUNK = 1 << 21  # entries cast at a time


@dataclass(frozen=True)
class Mark:
    """What is compared of one tensor.

    Attributes:
        values: float32. Of a matrix [1 + columns, rows]: its product with the signs, then its columns. Of a vector
            [1, n]: itself. More than two dimensions count as rows, but for the last.
        width: entries of a row, or None for a vector.
        dtype: the type that the tensor is held in, such as `bfloat16`.
        slack: relative difference that is allowed in values otherwise compared bit by bit.
    """

    values: np.ndarray
    width: int | None
    dtype: str
    slack: float = 0.0


Marks = dict[str, Mark]


@torch.no_grad()
def mark_of(tensor: Tensor, vectors: Vectors, dtype: torch.dtype | None = None, slack: float = 0.0) -> Mark:
    """The mark of a tensor as an engine holds it that computes in `dtype`; None for the tensor's own."""
    tensor, dtype = tensor.detach(), dtype or tensor.dtype
    name = dtype_name(dtype)
    if tensor.dim() < 2:
        return Mark(as_array(tensor.to(dtype).reshape(1, -1)), None, name, slack)
    rows = tensor.reshape(-1, tensor.shape[-1])
    width = rows.shape[1]
    columns = torch.tensor(vectors.columns(width), device=tensor.device)
    values = torch.empty(1 + len(columns), len(rows), device=tensor.device)
    values[1:] = rows.index_select(1, columns).T.to(dtype)
    _times(rows, vectors.signs(width, tensor.device), dtype, values[0])
    return Mark(as_array(values), width, name, slack)


def _times(rows: Tensor, signs: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """rows x signs [n], summed in float32; what has to be cast for that is cast a part at a time."""
    with full_precision():
        if rows.dtype == dtype == torch.float32:
            torch.mv(rows, signs, out=out)
            return
        size = max(1, _CHUNK // rows.shape[1])
        for part, own in zip(rows.split(size), out.split(size), strict=True):
            torch.mv(part.to(dtype).float(), signs, out=own)


def as_array(x: Tensor) -> np.ndarray:
    """In main memory as float32, which holds every float16 and bfloat16."""
    return x.detach().float().cpu().numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Ledger:
    """The trainer's marks, taken while its tensors pass on their way to the engine: none is read for this alone.

    Args:
        vectors: of this sync.
        dtype: that the engine computes in; None for that of each tensor.
        tied: name of a tensor that the stream leaves out -> the one it is.
        sideways: names of matrices that the model keeps as [in, out].
    Attributes:
        marks: by name, of what has passed so far.
        seconds: spent on them.
    """

    def __init__(
        self,
        vectors: Vectors,
        dtype: torch.dtype | None = None,
        tied: Mapping[str, str] | None = None,
        sideways: Collection[str] = (),
    ):
        self.vectors, self.dtype, self.tied, self.sideways = vectors, dtype, tied or {}, sideways
        self.marks: Marks = {}
        self.seconds = 0.0

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same names and tensors, noted as they pass."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor

    def note(self, name: str, tensor: Tensor, slack: float = 0.0) -> None:
        """Take the mark of one tensor."""
        began = time.perf_counter()
        upright = tensor.T if name in self.sideways else tensor
        self.add(name, mark_of(upright, self.vectors, self.dtype, slack))
        self.seconds += time.perf_counter() - began

    def add(self, name: str, mark: Mark) -> None:
        """Keep a mark, under all names that the tensor has."""
        self.marks[name] = mark
        for alias, source in self.tied.items():
            if source == name:
                self.marks[alias] = mark


def tied_names(model: Any) -> dict[str, str]:
    """Names under which a model has a tensor once more -> its first name, as of a head that is the embedding."""
    first: dict[int, str] = {}
    tied = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        name = plain_name(path)
        source = first.setdefault(id(weight), name)
        if source != name:
            tied[name] = source
    return tied


def sideways_names(model: Any) -> set[str]:
    """Names of the matrices that a model keeps as [in, out], as GPT-2 does, where engines have [out, in]."""
    from transformers.pytorch_utils import Conv1D

    return {f"{plain_name(path)}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)}


def plain_name(path: str) -> str:
    """The name of a module or tensor without what wrappers for adapters add."""
    path = path.removeprefix("base_model.model.")
    return ".".join(part for part in path.split(".") if part != "base_layer")
