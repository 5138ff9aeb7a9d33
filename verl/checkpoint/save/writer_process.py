"""The writer process (`python -m verl.checkpoint.save.writer_process`), and `WriterClient`, the trainer's side of it.

The process executes one save after another until the trainer closes the connection or exits. It is started when needed
and restarted if it dies; a save is tried twice, because its bytes are still in the host buffer. A process without
progress, such as a stopped one, is killed and counts as dead; with progress there is no time limit.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
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

NICENESS = 10  # added to the nice value of this process, so that training takes precedence
OF_PROCESS, OF_TRAINER = 0, 1  # slots of `Progress`: for the process, and for the trainer


@dataclass(frozen=True)
class WriteOrder:
    """A save to execute; the file descriptor of the host buffer is sent with it.

    Attributes:
        host_buffer: number of its allocation; `host_buffers_in_use` has the numbers of all that are in use.
    """

    request: SaveRequest
    host_buffer: int
    host_buffer_bytes: int
    host_buffers_in_use: frozenset[int]


WriteReply = SaveOutcome | tuple[Exception, str]  # to an order: its outcome, or the error and its traceback


def serve(channel: Channel, setting: tuple[CheckpointStore, Retention | None], progress: Progress) -> None:
    """Execute saves in a store, each followed by retention, until the trainer closes the channel."""
    logging.basicConfig(format="checkpoint writer: %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    store, retention = setting
    channel.send("started")
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
    """The memory of an order. Unmaps host buffers that the trainer has freed."""
    for number in mapped.keys() - order.host_buffers_in_use:
        with contextlib.suppress(BufferError):  # a failed save may still hold views; the memory is freed with them
            mapped.pop(number).close()
    try:
        if order.host_buffer not in mapped:
            mapped[order.host_buffer] = map_shared(fd, order.host_buffer_bytes)
    finally:
        os.close(fd)
    return mapped[order.host_buffer]


def _answer(store: CheckpointStore, order: WriteOrder, source: ImageSource, retention: Retention | None) -> WriteReply:
    try:
        return execute_save(store, order.request, source, retention)
    except Exception as error:  # noqa: BLE001 - the trainer's to handle
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an error of others' code, which is sent as text
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return error, trace


START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
OWN_EXIT_S = 0.2  # of a process whose channel was closed
ATTEMPTS = 2
SETTING = "checkpoint.writer_timeout_s"


class WriterDied(VerlError, RuntimeError):
    """The writer process ended, could not be started, or did not answer in time."""


class WriterClient:
    """Executes saves in the writer process and survives its death. For one thread; `give_up` may be called from any.

    Args:
        uses_process: False executes every save in the trainer's process.
        timeout_s: seconds without progress after which the process is treated as dead.
        progress: shared progress of the process and of the trainer.
    Attributes:
        num_deaths: number of deaths of writer processes so far.
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
        """Id of the writer process; None if it is not running."""
        return None if self._child is None or not self._child.is_alive() else self._child.pid

    def prepare(self) -> None:
        """Start the process ahead of the first save; failures are only logged."""
        try:
            self._started()
        except (CheckpointError, WriterDied) as error:  # the first save will report it
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
        """Make the save in progress fail, by killing the process."""
        self._gives_up = True
        self._kill()

    def end(self) -> None:
        """Close the channel, on which the idle process exits; kill it if it does not."""
        child, self._child = self._child, None
        if child is not None:
            child.end(END_TIMEOUT_S)

    def _started(self) -> ChildProcess:
        """The process, started if it is not running.

        Raises:
            WriterDied: it could not be started.
            CheckpointError: the directory could not be claimed.
        """
        if self._child is not None and self._child.is_alive():
            return self._child
        self._kill()  # clean up after one that ended between two saves; it does not count as an attempt
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
        """Send a save to the process and wait for its outcome.

        Raises:
            WriterDied: the process ended or was killed; the save may be retried.
            Exception: the error that the process raised.
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
        if isinstance(answer, tuple):
            error, trace = answer
            error.add_note(f"In the checkpoint writer:\n{trace}")
            raise error
        return answer

    def _kill(self) -> str:
        """Kill the process, even a stopped one. Returns its exit or prior state, for a message."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.channel.close()
        child.await_exit(OWN_EXIT_S)
        words = f"it ended with {ended}" if (ended := child.describe_exit()) else child.state()
        child.kill()
        return f" ({words})" if words else ""


if __name__ == "__main__":
    run_child("verl.checkpoint.save.writer_process", outlives_parent=True)  # a copied snapshot must still be saved
