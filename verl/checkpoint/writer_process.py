"""The process that writes checkpoints: `python -m verl.checkpoint.writer_process`, started by `supervisor.py` alone.

It carries out one plan after another until the trainer hangs up, and begins each while the trainer is still copying.
Whatever happens to the trainer, a plan whose tensors were copied is finished: its bytes lie in shared memory, which
lives as long as this process. Imports no torch.
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
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from verl.checkpoint.arena import filling, map_shared
from verl.checkpoint.carry_out import carry_out
from verl.checkpoint.channel import Channel, ChannelClosed
from verl.checkpoint.images import Source
from verl.checkpoint.plan import SavePlan, SaveReport
from verl.checkpoint.retention import Retention
from verl.checkpoint.store import CheckpointStore
from verl.utils.child_process import resume_without_parent
from verl.utils.progress import Progress, report, report_to

SOCKET_VARIABLE, PARENT_VARIABLE = "VERL_WRITER_SOCKET", "VERL_WRITER_PARENT"
PROGRESS_VARIABLE = "VERL_WRITER_PROGRESS"
OF_PROCESS, OF_TRAINER = 0, 1  # slots of the progress: what the process does, and what the trainer does itself


@dataclass(frozen=True)
class Start:
    """First message.

    Attributes:
        sys_path: the trainer's, so that what can be imported there can be imported here.
        setting: pickled `Setting`; opened after `sys_path` is in place.
    """

    sys_path: tuple[str, ...]
    setting: bytes


@dataclass(frozen=True)
class Setting:
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
class Order:
    """A plan to be carried out; the arena's file comes with it.

    Attributes:
        arena: its number, and those of all arenas that are still in use.
    """

    plan: SavePlan
    arena: int
    arena_bytes: int
    arenas_in_use: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """What became of an order: a report, or the pickled error and its traceback."""

    report: SaveReport | None = None
    error: bytes | None = None
    trace: str = ""


def serve(channel: Channel, is_trainer_alive: Callable[[], bool]) -> None:
    """Carry out plans until the trainer hangs up."""
    start, _ = channel.receive()
    sys.path[:] = [*start.sys_path, *(path for path in sys.path if path not in start.sys_path)]
    setting: Setting = pickle.loads(start.setting)
    with contextlib.suppress(OSError):
        os.nice(setting.niceness)
    store = CheckpointStore(setting.directory, setting.run_id, setting.disk_type(), setting.claim)
    channel.send(Answer())
    mapped: dict[int, mmap.mmap] = {}
    while True:
        report("idle")
        order, fd = channel.receive()
        report(f"saving step {order.plan.step}")
        assert fd is not None, "an order comes with its arena"
        memory = _mapped(mapped, order, fd)
        with memoryview(memory) as view:
            channel.send(_answer(store, order, filling(view, is_trainer_alive), setting.retention))


def _mapped(mapped: dict[int, mmap.mmap], order: Order, fd: int) -> mmap.mmap:
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


def _answer(store: CheckpointStore, order: Order, source: Source, retention: Retention | None) -> Answer:
    try:
        return Answer(carry_out(store, order.plan, source, retention))
    except Exception as error:  # noqa: BLE001 - the trainer's to handle
        return Answer(error=_pickled(error), trace=traceback.format_exc())


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
        serve(Channel(end, is_trainer_alive), is_trainer_alive)


if __name__ == "__main__":
    from verl.checkpoint.writer_process import main as imported_main  # so that messages are of the importable classes

    imported_main()
