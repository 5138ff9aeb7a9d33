"""Lazy tensors: a component's tensors in torch, mapped from the files, hashed when first read, moved to their
device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.core.manifest import ITEM_BYTES, LogicalTensor, SavedSlice
from verl.checkpoint.read.reader import CheckpointReader
from verl.errors import ConfigError
from verl.ops.resharding.layout import Box, intersection, within

DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device] | None

TORCH_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip


class MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read and hashed when it is accessed.

    A tensor on the CPU is a view of the mapped file: it takes no memory until it is accessed, and changes to it stay in
    this process. `dict(tensors)` reads all tensors.

    Args:
        reader: made with `writable=True`.
        tensors: of one component.
        device_map: see `device_of`.
    Raises:
        CheckpointCorrupt: on access to a tensor whose bytes differ from what was written.
    """

    def __init__(self, reader: CheckpointReader, tensors: list[LogicalTensor], device_map: DeviceMap = None):
        self._reader = reader
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._devices = {name: device_of(name, device_map) for name in self._tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        data = self._reader.tensor(tensor.component, name)
        return as_torch(data, tensor).to(self._devices[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # the inherited method would read the tensor

    def __repr__(self) -> str:
        return f"MappedTensors({len(self)} tensors of {self._reader.checkpoint.directory})"


class LazyTensor:
    """A tensor that is read when it is indexed: `saved[2:4, 0:8]` reads and hashes only the leaves with these rows.

    Args:
        reader: made with `writable=True`.
        tensor: of its checkpoint.
    Attributes:
        shape, dtype: of the whole tensor.
    """

    def __init__(self, reader: CheckpointReader, tensor: LogicalTensor):
        self.shape, self.dtype = torch.Size(tensor.shape), TORCH_TYPES[tensor.dtype]
        self._reader, self._tensor = reader, tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """Read a box: one slice with start and stop for each dimension, or () for the whole tensor.

        Returns:
            A view of the mapped file if one saved slice contains the box, otherwise a new tensor.
        Raises:
            CheckpointCorrupt: the bytes differ from what was written.
        """
        box = tuple((p.start, p.stop) for p in place) or tuple((0, size) for size in self.shape)
        whole = None
        for part in self._tensor.slices:
            held = tuple(zip(part.start, part.end))
            shared = intersection(box, held)
            if shared is None:
                continue
            rows = self._rows(part, shared)
            if shared == box:
                return rows
            if whole is None:
                whole = torch.empty([stop - start for start, stop in box], dtype=self.dtype)
            whole[within(shared, box)] = rows
        return torch.empty([stop - start for start, stop in box], dtype=self.dtype) if whole is None else whole

    def _rows(self, part: SavedSlice, box: Box) -> torch.Tensor:
        """The part of a box in one saved slice; rows before and after it are not read."""
        item = ITEM_BYTES[self._tensor.dtype]
        if not box:
            data = self._reader.read(part.file, part.offset, part.offset + item)
            return torch.frombuffer(data, dtype=self.dtype).view(())
        row = item * math.prod(part.extent[1:])
        first, last = (edge - part.start[0] for edge in box[0])
        data = self._reader.read(part.file, part.offset + first * row, part.offset + last * row)
        rows = torch.frombuffer(data, dtype=self.dtype).view(last - first, *part.extent[1:])
        others = tuple(slice(a - s, b - s) for (a, b), s in zip(box[1:], part.start[1:]))
        return rows[(slice(None), *others)]


def lazy_tensors(reader: CheckpointReader, component: str) -> dict[str, LazyTensor]:
    """The tensors of a component by name; nothing is read yet."""
    return {tensor.name: LazyTensor(reader, tensor) for tensor in reader.tensors(component)}


def as_torch(data: memoryview, tensor: LogicalTensor) -> torch.Tensor:
    """A torch tensor over the bytes of a whole tensor, without a copy."""
    dtype = TORCH_TYPES[tensor.dtype]
    if not len(data):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


def device_of(name: str, device_map: DeviceMap) -> torch.device:
    """Device of a tensor: one device for all, or a mapping from prefixes of names, of which the longest match is used.

    >>> device_of("model.layers.1.weight", {"": "cpu", "model.layers": "meta"})
    device(type='meta')

    Raises:
        ConfigError: the mapping does not cover this tensor, or the device is invalid.
    """
    if not isinstance(device_map, Mapping):
        return _device("cpu" if device_map is None else device_map)
    fitting = [prefix for prefix in device_map if prefix in ("", name) or name.startswith(f"{prefix}.")]
    if not fitting:
        raise ConfigError(f'device_map has no entry for {name}. Add a prefix of it, or "" for all others.')
    return _device(device_map[max(fitting, key=len)])


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device_map is {device!r}: it must name a device, such as cpu or cuda:0, or map prefixes of names to some."
        ) from error


def as_tensor(data: memoryview, tensor: LogicalTensor) -> Tensor:
    """A new tensor from the bytes of a logical tensor."""
    return as_torch(memoryview(bytearray(data)), tensor)
