"""The writer process (`python -m verl.checkpoint.save.writer_process`), and `WriterClient`, the trainer's side of it.

The process executes one save after another until the trainer closes the connection or exits. It is started when needed
and restarted when it died: a save is tried twice, since its bytes are still there then. A process that makes no
progress, such as one that is stopped, is ended and counts as dead; one that does may take as long as it needs.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import traceback
from dataclasses import dataclass

from verl.checkpoint.commit.rank_writer import ImageSource
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.retention import Retention
from verl.checkpoint.save.host_buffer import HostBuffer, HostBufferPool, filling, map_shared
from verl.checkpoint.save.save_executor import execute_save
from verl.checkpoint.save.save_request import SaveOutcome, SaveRequest
from verl.errors import CheckpointError, CheckpointWriteFailed, VerlError
from verl.utils.child_process.channel import STUCK_S, Channel, ChannelClosed
from verl.utils.child_process.process import ChildProcess, is_parent_alive, run_child
from verl.utils.progress import Progress, ProgressWatch, report, reporting_to

log = logging.getLogger(__name__)

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
    """Reply to an order: its outcome, or the error and its traceback."""

    outcome: SaveOutcome | None = None
    error: Exception | None = None
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
        return WriteReply(error=error, trace=traceback.format_exc())


START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
OWN_EXIT_S = 0.2  # of one that has hung up
ATTEMPTS = 2
SETTING = "checkpoint.writer_timeout_s"


class WriterDied(VerlError, RuntimeError):
    """The writer process ended, or could not be started, or did not answer in time."""


class WriterClient:
    """Has saves executed, whatever happens to processes. Used by one thread; `give_up` by any.

    Args:
        uses_process: False: the trainer's process executes every save.
        timeout_s: without progress of the process, which is treated as its death.
        progress: of the process, and of what the trainer does itself.
    Attributes:
        num_deaths: of writer processes so far.
    """

    def __init__(
        self,
        store: CheckpointStore,
        host_buffers: HostBufferPool,
        retention: Retention | None,
        uses_process: bool,
        timeout_s: float,
        progress: Progress,
    ):
        self.num_deaths, self._gives_up, self._uses_process = 0, False, uses_process
        self._store, self._host_buffers, self._retention = store, host_buffers, retention
        self._timeout_s, self._progress = timeout_s, progress
        self._child: ChildProcess | None = None

    @property
    def process_id(self) -> int | None:
        """None where there is no process just now."""
        return None if self._child is None or not self._child.is_alive() else self._child.pid

    def prepare(self) -> None:
        """Start the process."""
        try:
            self._started()
        except (CheckpointError, WriterDied) as error:  # the first save will say so
            log.warning("the checkpoint writer is not there yet: %s", error)

    def carry_out(self, request: SaveRequest, host_buffer: HostBuffer) -> SaveOutcome:
        """Write and publish the content of a host buffer.

        Raises:
            CheckpointError: nothing was published.
        """
        if not self._uses_process:
            assert host_buffer.memory is not None
            self._progress.advance(f"saving step {request.step} in the trainer", OF_TRAINER)
            with memoryview(host_buffer.memory) as memory, reporting_to(self._progress, OF_TRAINER):
                return execute_save(self._store, request, filling(memory), self._retention)
        for attempt in range(ATTEMPTS):
            self._progress.advance("starting the checkpoint writer", OF_TRAINER)
            try:
                return self._execute_in_process(request, host_buffer)
            except WriterDied as death:
                self.num_deaths += 1
                if self._gives_up:
                    raise CheckpointWriteFailed(f"step {request.step} was given up by close()") from death
                if attempt == ATTEMPTS - 1:
                    raise CheckpointWriteFailed(f"{death} Step {request.step} was tried {ATTEMPTS} times") from death
                log.error("%s The save is still in memory and is tried again", death)
        raise AssertionError("an attempt returns or raises")

    def give_up(self) -> None:
        """Let what is under way fail."""
        self._gives_up = True
        self._kill()

    def end(self) -> None:
        """Hang up: the process, which has nothing left to do, ends by itself, or is made to."""
        child, self._child = self._child, None
        if child is not None:
            child.end(END_TIMEOUT_S)

    def _started(self) -> ChildProcess:
        """The process, started unless it is there.

        Raises:
            WriterDied: it could not be started.
            CheckpointError: the directory could not be claimed.
        """
        if self._child is not None and self._child.is_alive():
            return self._child
        self._kill()  # what is left of one that ended between two saves, which is no attempt of this one
        self._store.claim_directory()
        try:
            child = self._child = ChildProcess(
                "verl.checkpoint.save.writer_process",
                self._progress,
                slot=OF_PROCESS,
                without=["VERL_RAY_SESSION"],  # it outlives its parent, to finish a save
                output=2,
                stuck_s=min(STUCK_S, self._timeout_s),
            )
            child.begin((self._store, self._retention))
            child.channel.receive(timeout_s=START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise WriterDied(f"the checkpoint writer could not be started: {error}{self._kill()}.") from error
        return child

    def _execute_in_process(self, request: SaveRequest, host_buffer: HostBuffer) -> SaveOutcome:
        """Have the process execute a save, and wait for it.

        Raises:
            WriterDied: its progress is unknown; the save may be retried.
            Exception: what was raised over there.
        """
        child = self._started()
        order = WriteOrder(request, host_buffer.number, host_buffer.num_bytes, self._host_buffers.numbers)
        watch = ProgressWatch(self._progress, self._timeout_s, [OF_PROCESS])
        try:
            child.channel.send(order, [host_buffer.fd])
            answer: WriteReply = child.channel.receive(watch=watch)
        except ChannelClosed as error:
            raise WriterDied(f"the checkpoint writer died while it saved step {request.step}{self._kill()}.") from error
        except TimeoutError as error:
            progress = watch.describe(child.pid, SETTING)
            self._kill()
            raise WriterDied(
                f"the checkpoint writer {progress}; it was ended, and step {request.step} not saved. Does the disk "
                "answer?"
            ) from error
        if answer.outcome is None:
            assert answer.error is not None
            answer.error.add_note(f"In the checkpoint writer:\n{answer.trace}")
            raise answer.error
        return answer.outcome

    def _kill(self) -> str:
        """End the process at once; one that is stopped too. Returns how it ended, or was before, for a message."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.channel.close()
        child.await_exit(OWN_EXIT_S)
        words = f"it ended with {ended}" if (ended := child.describe_exit()) else child.state()
        child.kill()
        return f" ({words})" if words else ""


if __name__ == "__main__":
    run_child("verl.checkpoint.save.writer_process", outlives_parent=True)  # what was copied is still to be saved
