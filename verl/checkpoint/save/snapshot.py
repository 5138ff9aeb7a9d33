"""Snapshots: components of a save, their layout in a host buffer, and the copy of live tensors into it.

    compute stream  ──forward, backward───────────┬── optimizer step        (weights may change)
                     │ ready                      │ wait_copied
    side stream      └──copies to pinned memory───┘
    host threads        memmove, without the interpreter's lock

While `Snapshot.run` copies, the tensors must not change.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from verl.checkpoint.commit.rank_writer import FileImage, page_aligned
from verl.checkpoint.core.manifest import LogicalTensor
from verl.checkpoint.core.safetensors_format import (
    DEFAULT_SHARD_BYTES,
    INDEX_NAME,
    MODEL_METADATA,
    lay_out,
    model_files,
)
from verl.checkpoint.read.lazy_tensors import TORCH_TYPES
from verl.checkpoint.save.host_buffer import HEAD_BYTES, HostBuffer, note_progress
from verl.checkpoint.save.save_request import SaveRequest

DTYPES = {dtype: name for name, dtype in TORCH_TYPES.items()}
log = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20  # large enough that threads seldom request the interpreter's lock

Piece = tuple[int, bytes | torch.Tensor]  # offset in the host buffer, and the content to copy there
Copy = tuple[int, int, int]  # offset in the host buffer, address, bytes


@dataclass(frozen=True, kw_only=True)
class PartialTensor:
    """A slice of a tensor; other processes save the rest.

    Args:
        tensor: the slice.
        shape: of the whole tensor.
        start: first index of the slice in each dimension.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SavedComponent:
    """One directory of a checkpoint.

    Args:
        tensors: by name, in the order in which a model's files are filled. Names do not depend on the number of
            writers. Any device and strides; may share memory. Slices need a `file`.
        file: name of the safetensors file; None for a model in Hugging Face's layout: `model.safetensors`, or shards
            and an index.
        metadata: metadata of that file, such as `{"format": "pt"}`, which a model always gets.
        files: other files by name.
        constant_files: files that rarely change, such as a tokenizer's: shared with the newest checkpoint if equal.
        max_shard_bytes: maximum size of a file of a model.
        shards: names of tensors by file, if a model is already split over several writers.
    """

    tensors: Mapping[str, torch.Tensor | PartialTensor] = field(default_factory=dict)
    file: str | None = None
    metadata: Mapping[str, str] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    constant_files: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    shards: Mapping[str, Sequence[str]] | None = None


def lay_out_request(request: SaveRequest) -> tuple[SaveRequest, list[Piece]]:
    """The request with components replaced by the memory layout of all files, and the pieces to copy into that memory.

    Raises:
        ValueError: a dtype that safetensors lacks, two files of one name, or a slice without a `file`.
        TypeError: `state` holds something that is not a plain value.
    """
    layout = _BufferLayout()
    for directory, component in request.components.items():
        layout.add(directory, component)
    names = [file.path for file in (*layout.images, *request.existing_files)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"a save holds {', '.join(sorted(twice))} twice")
    laid_out = replace(
        request,
        components={},
        state=json.loads(json.dumps(dict(request.state))),
        metrics={key: float(value) for key, value in request.metrics.items()},
        num_bytes=layout.end,
        images=tuple(layout.images),
        tensors=tuple(layout.tensors),
    )
    return laid_out, layout.pieces


class _BufferLayout:
    """Files one after another in memory, each page-aligned."""

    def __init__(self) -> None:
        self.end = HEAD_BYTES
        self.images: list[FileImage] = []
        self.pieces: list[Piece] = []
        self.tensors: list[LogicalTensor] = []

    def add(self, directory: str, component: SavedComponent) -> None:
        for name, data in component.files.items():
            self._reserve(f"{directory}/{name}", [data])
        for name, data in component.constant_files.items():
            self._reserve(f"{directory}/{name}", [data], is_constant=True)
        if not component.tensors:
            return
        tensors, index = component.tensors, None
        records = {name: _record(directory, name, x, component.file) for name, x in tensors.items()}
        metadata = {**(component.metadata or {}), **({} if component.file else MODEL_METADATA)}
        files = {component.file: list(tensors)} if component.file else component.shards
        if files is None:
            sizes = {name: record.num_bytes for name, record in records.items()}
            (files,), index = model_files([sizes], component.max_shard_bytes)
        for file, names in files.items():
            path = f"{directory}/{file}"
            header, laid_out = lay_out(path, [records[name] for name in names], metadata)
            self._reserve(path, [header, *(_local(tensors[record.name]) for record in laid_out)])
            self.tensors += laid_out
        if index is not None:
            self._reserve(f"{directory}/{INDEX_NAME}", [index])

    def _reserve(self, path: str, buffers: Sequence[bytes | torch.Tensor], is_constant: bool = False) -> None:
        sizes = tuple(len(b) if isinstance(b, bytes) else b.numel() * b.element_size() for b in buffers)
        image = FileImage(path=path, begin=self.end, sizes=sizes, is_constant=is_constant)
        begin = self.end
        for buffer, size in zip(buffers, sizes):
            if size:
                self.pieces.append((begin, buffer))
            begin += size
        self.images.append(image)
        self.end += page_aligned(image.num_bytes)


def _local(tensor: torch.Tensor | PartialTensor) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, PartialTensor) else tensor


def _record(component: str, name: str, tensor: torch.Tensor | PartialTensor, file: str | None) -> LogicalTensor:
    """The record of a tensor or slice; ValueError if it cannot be saved.

    Args:
        file: `SavedComponent.file` of its component.
    """
    data, where = _local(tensor), f"{component}/{name}"
    if data.dtype not in DTYPES:
        raise ValueError(f"{where} is of {data.dtype}, which safetensors does not know. Save it as another")
    is_dense = data.layout is torch.strided and not data.is_meta
    if not is_dense or (data.numel() and not data.untyped_storage().nbytes()):
        raise ValueError(f"{where} is not a dense tensor with its own memory")
    if not isinstance(tensor, PartialTensor):
        return LogicalTensor.of_slice(component, name, DTYPES[data.dtype], tuple(data.shape))
    if file is None:
        raise ValueError(f"{where} is a slice: a model's files hold whole tensors. Give the component a `file`")
    return LogicalTensor.of_slice(component, name, DTYPES[data.dtype], tensor.shape, tensor.start, tuple(data.shape))


class Snapshot:
    """One copy of the content of a save.

    Created at the step boundary by the training thread; `run` may be called from another thread.

    Args:
        pieces: content and offsets in the host buffer.
        num_threads: number of threads that copy from host memory.
    """

    def __init__(self, pieces: Sequence[Piece], num_threads: int):
        self._pieces, self._num_threads = pieces, num_threads
        devices = {content.device for _, content in pieces if isinstance(content, torch.Tensor)}
        # These events follow all work queued on the compute streams so far.
        self._ready = {device: _event(device) for device in devices if device.type == "cuda"}

    def run(self, host_buffer: HostBuffer, num_bytes: int) -> None:
        """Copy everything into a host buffer, which must be large enough, and note progress there. When this returns,
        the tensors may change."""
        memory = host_buffer.memory
        assert memory is not None
        assert host_buffer.num_bytes >= num_bytes
        if self._ready and host_buffer.before_release is None:
            host_buffer.before_release = pin_memory(
                torch.frombuffer(memory, dtype=torch.uint8), next(iter(self._ready))
            )
        target = torch.frombuffer(memory, dtype=torch.uint8)
        waiting = self._start_device_copies(target)
        # Copies from a device are asynchronous: nothing is published before they have finished.
        tells = (lambda end: None) if waiting else partial(note_progress, memory)
        _memmove_all(target, list(self._host_copies(target)), self._num_threads, tells)
        for event in waiting:
            event.synchronize()
        note_progress(memory, num_bytes)

    def _start_device_copies(self, target: torch.Tensor) -> list[torch.cuda.Event]:
        waiting = []
        for device, ready in self._ready.items():
            side = torch.cuda.Stream(device)
            side.wait_event(ready)
            with torch.cuda.device(device), torch.cuda.stream(side), torch.no_grad():  # else device 0 is opened, too
                for begin, content in self._pieces:
                    if isinstance(content, torch.Tensor) and content.device == device:
                        source = content.contiguous()
                        source.record_stream(side)
                        _view_at(target, begin, source).copy_(source, non_blocking=True)
                waiting.append(_event(device))
        return waiting

    def _host_copies(self, target: torch.Tensor) -> Iterator[Copy]:
        """Chunks for memmove; non-contiguous tensors and tensors on other devices are copied here."""
        for begin, content in self._pieces:
            if isinstance(content, bytes):
                target[begin : begin + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            elif content.device.type == "cuda":
                continue
            elif content.device.type == "cpu" and content.is_contiguous() and not content.is_neg():
                size = content.numel() * content.element_size()
                for done in range(0, size, CHUNK_BYTES):
                    yield begin + done, content.data_ptr() + done, min(CHUNK_BYTES, size - done)
            else:
                with torch.no_grad():
                    _view_at(target, begin, content).copy_(content)


def _memmove_all(target: torch.Tensor, copies: Sequence[Copy], num_threads: int, tells: Callable[[int], None]) -> None:
    """Copy in order, with this thread and others, or this one alone if none can be started (interpreter exit).

    Args:
        tells: called with the offset up to which everything is copied.
    """
    base, lock = target.data_ptr(), threading.Lock()
    todo, in_flight = iter(copies), []

    def work() -> None:
        copy = None
        while True:
            with lock:
                if copy is not None:
                    in_flight.remove(copy)
                copy = next(todo, None)
                if copy is not None:
                    in_flight.append(copy)
                if in_flight:
                    tells(min(in_flight)[0])
            if copy is None:
                return
            offset, address, size = copy
            ctypes.memmove(base + offset, address, size)

    others = []
    for _ in range(min(num_threads, len(copies)) - 1):
        others.append(threading.Thread(target=work, name="checkpoint_copy", daemon=True))
        try:
            others[-1].start()
        except RuntimeError:
            others.pop()
            break
    work()
    for other in others:
        other.join()


def _view_at(target: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    return target[begin : begin + size].view(like.dtype).view(like.shape)


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, whichever device copies into it


def pin_memory(memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
    """Pin memory, so that a device can copy into it asynchronously.

    Args:
        device: the device of this process. A new thread's current device is 0, and registering there would create a
            context on device 0 in every process.
    Returns: A function that unpins the memory; None if pinning failed, in which case copies take longer.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = memory.data_ptr(), memory.numel()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, size, PORTABLE))
    if code:
        log.warning("%.2f GiB of memory could not be pinned (CUDA error %d)", size / 2**30, code)
        return None

    def undo(_: torch.Tensor = memory) -> None:  # keeps `memory` alive until then
        with torch.cuda.device(device):
            if code := int(runtime.cudaHostUnregister(address)):
                log.warning("%.2f GiB of pinned memory could not be released (CUDA error %d)", size / 2**30, code)

    return undo
