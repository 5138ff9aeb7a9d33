"""Values on their way to another process: a small pickle, and the bytes of tensors beside it, never copied into it.

value ──wrap──> (pickle, buffers) ──shared memory──> unwrap ──> the value, its tensors lying on the buffers
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto

warnings.filterwarnings("ignore", message=".*buffer is not writable.*")  # received fields are read, never written


class Parcel(NamedTuple):
    """A wrapped value: what may be shared without a copy is in `buffers`, everything else in `head`."""

    head: bytes
    buffers: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def wrap(value: Any) -> Parcel:
    """A value as a pickle and the memory of its tensors, which is not copied: it must not change until it is sent."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Wrapper(head, buffers.append).dump(value)
    return Parcel(head.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


def unwrap(parcel: Parcel | tuple[bytes, Sequence[Any]]) -> Any:
    """The value again. Its tensors share the memory of the buffers, and may be as read-only as they are."""
    head, buffers = parcel
    return pickle.loads(head, buffers=buffers)


class _Wrapper(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keep: Callable[[pickle.PickleBuffer], None]):
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: bool(keep(buffer)))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DataProto:  # whose own pickle is safe from writers, by a copy where it arrives
            fields = dict(obj.batch), dict(obj.non_tensor_batch), obj.meta_info, obj._sources, obj._bound
            return _batch, fields
        if not isinstance(obj, Tensor) or obj.layout != torch.strided or not obj.numel():
            return NotImplemented
        flat = obj.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy()), obj.dtype, tuple(obj.shape))


def _batch(*fields: Any) -> DataProto:
    return DataProto()._fill(*fields)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
