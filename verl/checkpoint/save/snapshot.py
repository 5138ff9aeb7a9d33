"""Snapshots: live tensors copied into a host buffer.

    compute stream  ──forward, backward───────────┬── optimizer step        (weights may change)
                     │ ready                      │ wait_copied
    side stream      └──copies to pinned memory───┘
    host threads        memmove, without the interpreter's lock

From `Snapshot.begin` until `Snapshot.run` has returned the tensors must not change.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from verl.checkpoint.save.buffer_layout import CopyRegion
from verl.checkpoint.save.host_buffer import HostBuffer, note_progress

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20  # long enough that threads seldom ask for the interpreter's lock

Copy = tuple[int, int, int]  # offset in the host buffer, address, bytes


class Snapshot:
    """One copy of what a save consists of.

    Made at the step boundary by the thread that computes; `run` may be called by another one.

    Args:
        pieces: what goes where.
        num_threads: that copy from the memory of the processor.
    """

    def __init__(self, pieces: Sequence[CopyRegion], num_threads: int):
        self._pieces, self._num_threads = pieces, num_threads
        devices = {piece.content.device for piece in pieces if isinstance(piece.content, torch.Tensor)}
        # Work queued on the compute streams so far is done before these events.
        self._ready = {device: _event(device) for device in devices if device.type == "cuda"}

    def run(self, host_buffer: HostBuffer, num_bytes: int) -> None:
        """Copy everything into a host buffer that fits, and note there how far it is. When it returns, the tensors may
        change."""
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
            with torch.cuda.stream(side), torch.no_grad():
                for piece in self._pieces:
                    if isinstance(piece.content, torch.Tensor) and piece.content.device == device:
                        source = piece.content.contiguous()
                        source.record_stream(side)
                        _place(target, piece.begin, source).copy_(source, non_blocking=True)
                waiting.append(_event(device))
        return waiting

    def _host_copies(self, target: torch.Tensor) -> Iterator[Copy]:
        """Chunks for memmove; tensors with gaps or on other devices are copied directly."""
        for piece in self._pieces:
            content = piece.content
            if isinstance(content, bytes):
                target[piece.begin : piece.begin + len(content)] = torch.frombuffer(
                    bytearray(content), dtype=torch.uint8
                )
            elif content.device.type == "cuda":
                continue
            elif content.device.type == "cpu" and content.is_contiguous() and not content.is_neg():
                size = content.numel() * content.element_size()
                for done in range(0, size, CHUNK_BYTES):
                    yield piece.begin + done, content.data_ptr() + done, min(CHUNK_BYTES, size - done)
            else:
                with torch.no_grad():
                    _place(target, piece.begin, content).copy_(content)


def _memmove_all(target: torch.Tensor, copies: Sequence[Copy], num_threads: int, tells: Callable[[int], None]) -> None:
    """Copy in order, with this thread and others; alone where none can be started, as at the interpreter's end.

    Args:
        tells: called with the offset before which all is there.
    """
    base, lock = target.data_ptr(), threading.Lock()
    todo, under_way = iter(copies), []

    def work() -> None:
        copy = None
        while True:
            with lock:
                if copy is not None:
                    under_way.remove(copy)
                copy = next(todo, None)
                if copy is not None:
                    under_way.append(copy)
                if under_way:
                    tells(min(under_way)[0])
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


def _place(target: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    return target[begin : begin + size].view(like.dtype).view(like.shape)


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, whichever device copies into it


def pin_memory(memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
    """Let a device copy into this memory by itself.

    Args:
        device: whose process this is. A thread starts with device 0 as its own, and registering there would open a
            context on it in every process.
    Returns:
        What undoes it; None where the system does not allow it, and copies then take longer.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = memory.data_ptr(), memory.numel()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, size, PORTABLE))
    if code:
        log.warning("%.2f GiB of memory could not be pinned (CUDA error %d)", size / 2**30, code)
        return None

    def undo(_: torch.Tensor = memory) -> None:  # which must be there until then
        with torch.cuda.device(device):
            if code := int(runtime.cudaHostUnregister(address)):
                log.warning("%.2f GiB of pinned memory could not be released (CUDA error %d)", size / 2**30, code)

    return undo
