"""The writer process: `python -m verl.checkpoint.save.writer_process`, started by `writer_client.py` alone.

It executes one save plan after another until the trainer closes the connection or exits.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.direct_io import ImageSource
from verl.checkpoint.retention import Retention
from verl.checkpoint.save.host_buffer import filling, map_shared
from verl.checkpoint.save.save_executor import execute_plan
from verl.checkpoint.save.save_plan import SavePlan, SaveReport
from verl.utils.child_process import resume_without_parent
from verl.utils.progress import Progress, ProgressWatch, report, report_to

LENGTH_BYTES = 8
STUCK_S = 60.0  # the other end takes a message that was begun within this time, or counts as dead
LOOK_EVERY_S = 0.5  # how soon the end of the other process is noticed where a third one holds the socket open

_living: weakref.WeakSet[IPCChannel] = weakref.WeakSet()


class ChannelClosed(ConnectionError):
    """The other process has hung up or ended."""


class IPCChannel:
    """One end.

    Args:
        is_other_alive: asked now and then while nothing arrives: a forked child of the trainer may hold the socket
            open after the trainer is gone.
        stuck_s: how long sending may take.
    """

    def __init__(self, end: socket.socket, is_other_alive: Callable[[], bool], stuck_s: float = STUCK_S):
        self._socket, self._is_other_alive = end, is_other_alive
        end.settimeout(stuck_s)
        _living.add(self)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send an object and perhaps an open file.

        Raises:
            ChannelClosed: nobody is there to receive it.
        """
        data = pickle.dumps(message)
        try:
            fds = [] if fd is None else [fd]
            sent = socket.send_fds(self._socket, [len(data).to_bytes(LENGTH_BYTES, "little")], fds)
            assert sent == LENGTH_BYTES
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None, watch: ProgressWatch | None = None) -> tuple[Any, int | None]:
        """The next object, and the file that came with it, which the caller closes.

        Args:
            watch: of the other process, which is waited for as long as it makes progress.
        Raises:
            ChannelClosed: the other end has hung up, or its process is gone.
            TimeoutError: nothing came in time.
        """
        self._wait(timeout_s, watch)
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, 1)
            head += self._exactly(LENGTH_BYTES - len(head)) if head else b""
            if not head:
                raise ChannelClosed("hung up")
            data = self._exactly(int.from_bytes(head, "little"))
        except ChannelClosed:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for fd in fds:
            os.set_inheritable(fd, False)
        return pickle.loads(data), fds[0] if fds else None

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _wait(self, timeout_s: float | None, watch: ProgressWatch | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = LOOK_EVERY_S if deadline is None else min(LOOK_EVERY_S, deadline - time.monotonic())
            if watch is not None:
                left = min(left, watch.timeout_s / 2)
            try:
                if wait([self._socket], max(left, 0)):  # unlike select, for any number of open files
                    return
            except (OSError, ValueError) as error:  # closed by another thread
                raise ChannelClosed(str(error)) from error
            if not self._is_other_alive():
                # What it said before it ended is still there.
                if wait([self._socket], 0):
                    return
                raise ChannelClosed("the process is gone")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no answer for {timeout_s} s")
            if watch is not None and watch.is_overdue:
                raise TimeoutError(f"no progress for {watch.timeout_s:g} s")

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ChannelClosed("hung up within a message")
            view = view[received:]
        return bytes(data)


def _forget_in_child() -> None:
    for channel in list(_living):
        channel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


SOCKET_VARIABLE, PARENT_VARIABLE = "VERL_WRITER_SOCKET", "VERL_WRITER_PARENT"
PROGRESS_VARIABLE = "VERL_WRITER_PROGRESS"
OF_PROCESS, OF_TRAINER = 0, 1  # slots of the progress: what the process does, and what the trainer does itself


@dataclass(frozen=True)
class WriterStart:
    """First message.

    Attributes:
        sys_path: the trainer's, so that what can be imported there can be imported here.
        setting: pickled `WriterProcessSettings`; opened after `sys_path` is in place.
    """

    sys_path: tuple[str, ...]
    setting: bytes


@dataclass(frozen=True)
class WriterProcessSettings:
    """What is the same for all saves.

    Attributes:
        disk_type: class of the store's disk, which is made anew here.
        claim: on the directory, taken by the trainer.
        niceness: added to the priority value of this process.
    """

    directory: str
    run_id: str
    claim: str
    disk_type: type
    retention: Retention | None
    niceness: int


@dataclass(frozen=True)
class WriteOrder:
    """A plan to be carried out; the arena's file comes with it.

    Attributes:
        arena: its number, and those of all arenas that are still in use.
    """

    plan: SavePlan
    arena: int
    arena_bytes: int
    arenas_in_use: frozenset[int]


@dataclass(frozen=True)
class WriteReply:
    """What became of an order: a report, or the pickled error and its traceback."""

    report: SaveReport | None = None
    error: bytes | None = None
    trace: str = ""


def serve(channel: IPCChannel, is_trainer_alive: Callable[[], bool]) -> None:
    """Carry out plans until the trainer hangs up."""
    start, _ = channel.receive()
    sys.path[:] = [*start.sys_path, *(path for path in sys.path if path not in start.sys_path)]
    setting: WriterProcessSettings = pickle.loads(start.setting)
    with contextlib.suppress(OSError):
        os.nice(setting.niceness)
    store = CheckpointStore(setting.directory, setting.run_id, setting.disk_type(), setting.claim)
    channel.send(WriteReply())
    mapped: dict[int, mmap.mmap] = {}
    while True:
        report("idle")
        order, fd = channel.receive()
        report(f"saving step {order.plan.step}")
        assert fd is not None, "an order comes with its arena"
        memory = _mapped(mapped, order, fd)
        with memoryview(memory) as view:
            channel.send(_answer(store, order, filling(view, is_trainer_alive), setting.retention))


def _mapped(mapped: dict[int, mmap.mmap], order: WriteOrder, fd: int) -> mmap.mmap:
    """The memory of an order. Those of arenas that the trainer has given up are given back."""
    for number in mapped.keys() - order.arenas_in_use:
        with contextlib.suppress(BufferError):  # a failed save may still hold views; the memory goes with them
            mapped.pop(number).close()
    try:
        if order.arena not in mapped:
            mapped[order.arena] = map_shared(fd, order.arena_bytes)
    finally:
        os.close(fd)
    return mapped[order.arena]


def _answer(store: CheckpointStore, order: WriteOrder, source: ImageSource, retention: Retention | None) -> WriteReply:
    try:
        return WriteReply(execute_plan(store, order.plan, source, retention))
    except Exception as error:  # noqa: BLE001 - the trainer's to handle
        return WriteReply(error=_pickled(error), trace=traceback.format_exc())


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an error of somebody's own making; its text travels
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="checkpoint writer: %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    parent = int(os.environ.pop(PARENT_VARIABLE))
    resume_without_parent()  # if it is stopped: what was copied is still to be saved
    report_to(Progress.open(int(os.environ.pop(PROGRESS_VARIABLE))), OF_PROCESS)
    end = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE)))

    def is_trainer_alive() -> bool:
        return os.getppid() == parent

    with contextlib.suppress(ChannelClosed):
        serve(IPCChannel(end, is_trainer_alive), is_trainer_alive)


if __name__ == "__main__":
    # so that messages are of the importable classes
    from verl.checkpoint.save.writer_process import main as imported_main

    imported_main()
