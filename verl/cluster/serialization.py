"""Serialization of values for other processes: a small pickle, and tensor bytes beside it that are not copied into it.

value ──wrap──> (pickle, buffers) ──shared memory──> unwrap ──> the value, its tensors lying on the buffers
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.serialization import raw_bytes, taken

warnings.filterwarnings("ignore", message=".*buffer is not writable.*")  # received fields are read, never written


class RowSubset(NamedTuple):
    """Some rows of a batch, which arrives as a batch of these: they are taken while they are sent, in one copy."""

    batch: DataProto
    rows: Tensor


class RowSelection(NamedTuple):
    """The bytes of some rows of a tensor, not taken yet."""

    tensor: Tensor
    rows: Tensor

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (self.tensor[:1].numel() if len(self.tensor) else 0) * self.tensor.element_size()

    def write(self, into: np.ndarray) -> None:
        """Copy the rows into memory of this size."""
        shape = (len(self.rows), *self.tensor.shape[1:])
        tensor, rows = self.tensor.detach().resolve_conj().resolve_neg(), self.rows.to(self.tensor.device)
        target = torch.frombuffer(into, dtype=self.tensor.dtype).view(shape)
        if tensor.device.type == "cpu":
            taken(tensor, rows, target)
        else:
            target.copy_(taken(tensor, rows))


class Serialized(NamedTuple):
    """A wrapped value: what may be shared without a copy is in `buffers`, everything else in `head`."""

    head: bytes
    buffers: list[Any]  # np.ndarray, or RowSelection where Rows were wrapped

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def serialize(value: Any) -> Serialized:
    """A value as a pickle and the memory of its tensors, which is not copied: it must not change until it is sent."""
    head, buffers = io.BytesIO(), _KeptBuffers()
    _BatchPickler(head, buffers).dump(value)
    return Serialized(head.getvalue(), buffers.buffers)


def deserialize(serialized: Serialized | tuple[bytes, Sequence[Any]]) -> Any:
    """The value again. Its tensors share the memory of the buffers, and may be as read-only as they are."""
    head, buffers = serialized
    return pickle.loads(head, buffers=buffers)


class _KeptBuffers:
    """Buffers that are kept out of a pickle.

    It knows nothing of the pickler: a pickler that held its own method would be a reference cycle, and every batch that
    was sent would stay in memory until the cyclic collector runs.
    """

    def __init__(self):
        self.buffers: list[Any] = []
        self.selections: dict[int, tuple[pickle.PickleBuffer, RowSelection]] = {}  # by id of what stands for them

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        _, selection = self.selections.get(id(buffer), (None, None))
        self.buffers.append(np.frombuffer(buffer.raw(), np.uint8) if selection is None else selection)
        return False


class _BatchPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kept: _KeptBuffers):
        self._selections = kept.selections
        super().__init__(file, protocol=5, buffer_callback=kept.keep)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DataProto:  # whose own pickle is safe from writers, by a copy where it arrives
            return _batch, _fields(obj)
        if type(obj) is RowSubset:
            return _batch, _fields_of_rows(*obj)
        if type(obj) is RowSelection:
            if not obj.nbytes:
                return _empty, ((len(obj.rows), *obj.tensor.shape[1:]), obj.tensor.dtype)
            stands_for_it = pickle.PickleBuffer(bytearray())
            self._selections[id(stands_for_it)] = stands_for_it, obj
            return _tensor, (stands_for_it, obj.tensor.dtype, (len(obj.rows), *obj.tensor.shape[1:]))
        if not isinstance(obj, Tensor) or obj.layout != torch.strided or obj.is_quantized or obj.is_nested:
            return NotImplemented
        if not obj.numel():
            return _empty, (tuple(obj.shape), obj.dtype)
        buffer: Any = raw_bytes(obj).numpy()
        return _tensor, (pickle.PickleBuffer(buffer), obj.dtype, tuple(obj.shape))


def _fields(batch: DataProto) -> tuple[Any, ...]:
    return dict(batch.batch), dict(batch.non_tensor_batch), batch.meta_info, batch._sources, batch._bound


def _fields_of_rows(batch: DataProto, rows: Tensor) -> tuple[Any, ...]:
    tensors, arrays, meta_info, sources, bound = _fields(batch)
    positions = rows.numpy()
    return (
        {name: RowSelection(tensor, rows) for name, tensor in tensors.items()},
        {name: array[positions] for name, array in arrays.items()},
        meta_info,
        sources,
        {**bound, "B": (len(rows), bound["B"][1])} if "B" in bound else {},
    )


def _batch(*fields: Any) -> DataProto:
    return DataProto()._fill(*fields)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
