"""The writer process: `python -m verl.checkpoint.save.writer_process`, started by `writer_client.py` alone.

It executes one save after another until the trainer closes the connection or exits.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import traceback
from dataclasses import dataclass

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.direct_io import ImageSource
from verl.checkpoint.retention import Retention
from verl.checkpoint.save.host_buffer import filling, map_shared
from verl.checkpoint.save.save_executor import execute_save
from verl.checkpoint.save.save_request import SaveOutcome, SaveRequest
from verl.utils.child_process.channel import Channel
from verl.utils.child_process.process import is_parent_alive, run_child
from verl.utils.progress import Progress, report

NICENESS = 10  # added to the priority value of this process, so that training keeps its processors
OF_PROCESS, OF_TRAINER = 0, 1  # slots of the progress: what the process does, and what the trainer does itself


@dataclass(frozen=True)
class WriteOrder:
    """A save to be executed; the host buffer's file comes with it.

    Attributes:
        host_buffer: its number, and those of all host buffers that are still in use.
    """

    request: SaveRequest
    host_buffer: int
    host_buffer_bytes: int
    host_buffers_in_use: frozenset[int]


@dataclass(frozen=True)
class WriteReply:
    """Reply to an order: its outcome, or the pickled error and its traceback."""

    outcome: SaveOutcome | None = None
    error: bytes | None = None
    trace: str = ""


def serve(channel: Channel, setting: tuple[CheckpointStore, Retention | None], progress: Progress) -> None:
    """Execute saves in a store, each followed by retention, until the trainer hangs up."""
    logging.basicConfig(format="checkpoint writer: %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    store, retention = setting
    channel.send(WriteReply())
    mapped: dict[int, mmap.mmap] = {}
    while True:
        report("idle")
        order: WriteOrder
        order, (file,) = channel.receive_with_files()
        report(f"saving step {order.request.step}")
        memory = _mapped(mapped, order, file)
        with memoryview(memory) as view:
            channel.send(_answer(store, order, filling(view, is_parent_alive), retention))


def _mapped(mapped: dict[int, mmap.mmap], order: WriteOrder, fd: int) -> mmap.mmap:
    """The memory of an order. Those of host buffers that the trainer has given up are given back."""
    for number in mapped.keys() - order.host_buffers_in_use:
        with contextlib.suppress(BufferError):  # a failed save may still hold views; the memory goes with them
            mapped.pop(number).close()
    try:
        if order.host_buffer not in mapped:
            mapped[order.host_buffer] = map_shared(fd, order.host_buffer_bytes)
    finally:
        os.close(fd)
    return mapped[order.host_buffer]


def _answer(store: CheckpointStore, order: WriteOrder, source: ImageSource, retention: Retention | None) -> WriteReply:
    try:
        return WriteReply(execute_save(store, order.request, source, retention))
    except Exception as error:  # noqa: BLE001 - the trainer's to handle
        return WriteReply(error=_pickled(error), trace=traceback.format_exc())


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - user-defined errors are sent as text
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


if __name__ == "__main__":
    run_child("verl.checkpoint.save.writer_process", outlives_parent=True)  # what was copied is still to be saved
