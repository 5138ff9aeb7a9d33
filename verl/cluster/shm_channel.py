"""Message channel between the driver and a worker: pickles through a socket, tensor bytes through shared memory.

    pack ──> Message ──send──> socket: pickle, open file ──> receive ──> value
                └──bytes──> file in memory ────────────────────────────> views of its tensors

The files have no name, so that a killed process leaves none; their memory is freed with the last view.

A value is serialized to a small pickle and separate buffers with the bytes of its tensors:

value ──wrap──> (pickle, buffers) ──shared memory──> unwrap ──> the value, its tensors are views of the buffers
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.serialization import raw_bytes
from verl.utils.child_process.channel import Channel
from verl.utils.progress import nameless_file

SMALL = 2**15  # bytes: messages with fewer bytes of tensors go through the socket
ALIGNMENT = 64  # bytes: alignment of tensors


warnings.filterwarnings("ignore", message=".*buffer is not writable.*")  # from Ray's object store


class Serialized(NamedTuple):
    """A serialized value: memory that is shared without a copy is in `buffers`, everything else in `head`."""

    head: bytes
    buffers: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def serialize(value: Any) -> Serialized:
    """A value as a pickle and the memory of its tensors, not copied: do not modify them until it is sent."""
    head, buffers = io.BytesIO(), list[np.ndarray]()
    _BatchPickler(head, 5, buffer_callback=lambda kept: buffers.append(np.frombuffer(kept.raw(), np.uint8))).dump(value)
    return Serialized(head.getvalue(), buffers)


def deserialize(serialized: Serialized | tuple[bytes, Sequence[Any]]) -> Any:
    """The value; its tensors share the memory of the buffers, and are read-only if the buffers are."""
    head, buffers = serialized
    return pickle.loads(head, buffers=buffers)


class _BatchPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DataProto:  # its own pickling copies on arrival, to protect it from writers
            return _batch, _fields(obj)
        if not isinstance(obj, Tensor) or obj.layout != torch.strided or obj.is_quantized or obj.is_nested:
            return NotImplemented
        if not obj.numel():
            return _empty, (tuple(obj.shape), obj.dtype)
        buffer: Any = raw_bytes(obj).numpy()
        return _tensor, (pickle.PickleBuffer(buffer), obj.dtype, tuple(obj.shape))


def _fields(batch: DataProto) -> tuple[Any, ...]:
    tensors, arrays, meta_info, sources, bound, ragged = batch._fields()
    return dict(tensors), dict(arrays), meta_info, sources, bound, {name: x.compact() for name, x in ragged.items()}


def _batch(*fields: Any) -> DataProto:
    return DataProto()._fill(*fields)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(frozen=True)
class Message:
    """A packed value, for any number of receivers.

    Attributes:
        head: see `Serialized`.
        inline: the bytes of tensors, if their total is less than `SMALL`.
        file: descriptor of a file in memory with the bytes, closed with the message.
        spans: their ranges in the file.
    """

    head: bytes
    inline: list[bytes]
    file: int | None = None
    spans: tuple[tuple[int, int], ...] = ()


def pack(value: Any) -> Message:
    """A message with this value, which may be modified afterwards."""
    head, buffers = serialize(value)
    if sum(buffer.nbytes for buffer in buffers) < SMALL:
        return Message(head, [buffer.tobytes() for buffer in buffers])
    spans, end = [], 0
    for buffer in buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + buffer.nbytes
        spans.append((start, end))
    file = nameless_file(end)
    message = Message(head, [], file, tuple(spans))
    weakref.finalize(message, os.close, file)
    for buffer, (start, end) in zip(buffers, spans, strict=True):
        while start < end:
            start += os.pwrite(file, buffer[start - end :].data, start)
    return message


def send(channel: Channel, message: Message) -> None:
    """Send a message; raises OSError if the connection is closed."""
    files = [] if message.file is None else [message.file]
    channel.send((message.head, message.inline, message.spans), files)


def send_if_open(channel: Channel, message: Message) -> None:
    """Send a message, ignoring a closed connection: the receiving thread reports that."""
    with contextlib.suppress(OSError):
        send(channel, message)


def receive(channel: Channel) -> Any:
    """The value of the next message; its tensors may be kept and modified, other receivers do not see that.

    Raises:
        EOFError, OSError: the connection is closed.
    """
    (head, inline, spans), files = channel.receive_with_files()
    if not files:
        return deserialize((head, list(map(bytearray, inline))))
    (file,) = files
    area = np.frombuffer(mmap.mmap(file, spans[-1][1], flags=mmap.MAP_PRIVATE), np.uint8)
    os.close(file)
    return deserialize((head, [area[start:end] for start, end in spans]))
