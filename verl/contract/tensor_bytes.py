"""The bytes of a tensor: its own entries alone, in order, whatever it is a view of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The entries on the CPU, without gradient, one behind the other; shares their memory where they lie so."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `in_order`, [numel * itemsize] uint8."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    whole = in_order(tensor)  # with one entry its strides may be anything
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def from_bytes(data: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor whose `raw_bytes` these are, on their memory."""
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(tuple(shape))


def taken(tensor: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """tensor[rows], of any dtype; with `out` written there, without gradient."""
    try:
        return torch.index_select(tensor, 0, rows, out=out)
    except NotImplementedError:  # as of uint16 in one dim: the same bytes in a dtype that torch can take rows of
        like = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        place = None if out is None else out.view(like)
        return torch.index_select(tensor.view(like), 0, rows, out=place).view(tensor.dtype)


class OwnBytes:
    """Stands for a tensor in what is pickled, and is that tensor again where it arrives.

    Torch would take the whole storage along that a tensor is a view of, and cannot load some dtypes.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __reduce__(self):
        tensor = self.tensor
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return _arrived, (
            raw_bytes(tensor).numpy(), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, is_parameter
        )  # fmt: skip

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copied(self.tensor)


def _arrived(
    raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = from_bytes(raw if raw.flags.writeable else raw.copy(), dtype, shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory of their own, as a leaf that requires gradients where the original does."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(own, tensor.requires_grad)
    return own.requires_grad_(tensor.requires_grad)


def portable(value: Any) -> Any:
    """The value with `OwnBytes` in place of its dense tensors, in lists, tuples, dicts and object arrays; one without
    tensors is given back as it is."""
    return _portable(value, {})


_WITHOUT_TENSORS = frozenset({str, bytes, int, float, bool, type(None)})


def _portable(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if type(value) in _WITHOUT_TENSORS:
        return value
    if id(value) in known:
        return known[id(value)][1]
    if not _may_hold_tensors(value):
        return value
    known[id(value)] = (value, value)  # what contains itself stays as it is
    made = _made_portable(value, known)
    known[id(value)] = (value, made)
    return made


def _may_hold_tensors(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict):
        return not set(map(type, value.values() if kind is dict else value)) <= _WITHOUT_TENSORS
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
    return kind is np.ndarray and value.dtype == object


def _made_portable(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return OwnBytes(value)
    items = list(value.values()) if kind is dict else value.reshape(-1).tolist() if kind is np.ndarray else value
    if set(map(type, items)) <= _WITHOUT_TENSORS:
        return value
    made = [_portable(item, known) for item in items]
    if all(new is old for new, old in zip(made, items)):
        return value
    if kind is dict:
        return dict(zip(value, made))
    if kind is np.ndarray:
        return np.fromiter(made, dtype=object, count=len(made)).reshape(value.shape)
    return kind(made)
