"""The trainer's side of the writer process: started when needed, restarted when it died, ended with the trainer.

A save is tried twice by a process, since its bytes are still there when the first one dies, and then by the trainer.
One that makes no progress, such as one that is stopped, is ended and counts as dead; one that does may take as long as
it needs.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.retention import Retention
from verl.checkpoint.save.host_buffer import HostBuffer, HostBufferPool, filling
from verl.checkpoint.save.save_executor import execute_save
from verl.checkpoint.save.save_request import SaveReport, SaveRequest
from verl.checkpoint.save.writer_process import OF_PROCESS, OF_TRAINER, WriteOrder, WriteReply, WriterProcessSettings
from verl.errors import CheckpointError, CheckpointWriteFailed, VerlError
from verl.utils.child_process.channel import STUCK_S, ChannelClosed
from verl.utils.child_process.process import ChildProcess
from verl.utils.progress import Progress, ProgressWatch, reporting_to

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
OWN_EXIT_S = 0.2  # of one that has hung up
ATTEMPTS = 2
SETTING = "checkpoint.writer_timeout_s"


class WriterDied(VerlError, RuntimeError):
    """The writer process ended, or could not be started, or did not answer in time."""


class WriterProcess:
    """A process that executes saves.

    Args:
        timeout_s: without progress, which is treated as the death of the process.
        progress: where it reports it.
    """

    def __init__(
        self, setting: WriterProcessSettings, host_buffers: HostBufferPool, timeout_s: float, progress: Progress
    ):
        self._setting, self._host_buffers, self._timeout_s, self._progress = setting, host_buffers, timeout_s, progress
        self._child: ChildProcess | None = None

    @property
    def process_id(self) -> int | None:
        """None while there is no process."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start it, unless it is there.

        Raises:
            WriterDied: it could not be started.
        """
        self._started()

    def _started(self) -> ChildProcess:
        if self._child is not None:
            return self._child
        try:
            child = self._child = ChildProcess(
                "verl.checkpoint.save.writer_process",
                self._progress,
                slot=OF_PROCESS,
                without=["VERL_RAY_SESSION"],  # it outlives its parent, to finish a save
                output=2,
                stuck_s=min(STUCK_S, self._timeout_s),
            )
            child.begin(self._setting)
            child.channel.receive(timeout_s=START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            ending = self.kill()
            raise WriterDied(f"the checkpoint writer could not be started: {error}{ending}") from error
        return child

    def carry_out(self, request: SaveRequest, host_buffer: HostBuffer) -> SaveReport:
        """Have a save executed, and wait for it.

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
            raise WriterDied(f"the checkpoint writer died while it saved step {request.step}{self.kill()}") from error
        except TimeoutError as error:
            found = watch.describe(child.pid, SETTING)
            self.kill()
            raise WriterDied(
                f"the checkpoint writer {found}; it was ended, and step {request.step} not saved"
            ) from error
        if answer.report is None:
            assert answer.error is not None
            error = pickle.loads(answer.error)
            error.add_note(f"In the checkpoint writer:\n{answer.trace}")
            raise error
        return answer.report

    def end(self) -> None:
        """Hang up: it ends by itself, or is made to."""
        child, self._child = self._child, None
        if child is not None:
            child.end(END_TIMEOUT_S)

    def kill(self) -> str:
        """End it at once; one that is stopped too. Returns how it ended, or was before, for a message."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.channel.close()
        child.await_exit(OWN_EXIT_S)
        words = f"it ended with {ended}" if (ended := child.describe_exit()) else child.state()
        child.kill()
        return f" ({words})" if words else ""


@dataclass(frozen=True)
class WriterSettings:
    """How the process is run; see `CheckpointWriter`."""

    is_used: bool
    niceness: int
    timeout_s: float


class WriterClient:
    """Has saves executed, whatever happens to processes. Used by one thread; `give_up` by any.

    Args:
        progress: of the process, and of what the trainer does itself.
    Attributes:
        num_deaths: of writer processes so far.
    """

    def __init__(
        self,
        store: CheckpointStore,
        host_buffers: HostBufferPool,
        retention: Retention | None,
        process_setting: WriterSettings,
        progress: Progress,
    ):
        self.num_deaths, self._progress = 0, progress
        self._store, self._host_buffers, self._retention, self._setting = (
            store,
            host_buffers,
            retention,
            process_setting,
        )
        self._process: WriterProcess | None = None
        self._gives_up = False

    @property
    def process_id(self) -> int | None:
        """None where there is no process just now."""
        return None if self._process is None else self._process.process_id

    def prepare(self) -> None:
        """Start the process."""
        try:
            self._process = self._process or self._new_process()
            self._process.start()
        except (CheckpointError, WriterDied) as error:  # the first save will say so
            log.warning("the checkpoint writer is not there yet: %s", error)

    def carry_out(self, request: SaveRequest, host_buffer: HostBuffer) -> SaveReport:
        """Write and publish the content of a host buffer.

        Raises:
            CheckpointError: nothing was published.
        """
        for _ in range(ATTEMPTS if self._setting.is_used else 0):
            self._progress.advance("starting the checkpoint writer", OF_TRAINER)
            try:
                self._process = self._process or self._new_process()
                return self._process.carry_out(request, host_buffer)
            except WriterDied as death:
                self.num_deaths += 1
                if self._gives_up:
                    raise CheckpointWriteFailed(f"step {request.step} was given up by close()") from death
                log.error("%s; the save is still in memory", death)
        if self._setting.is_used:
            log.error(
                "the checkpoint writer died %d times: the trainer's process writes step %d", ATTEMPTS, request.step
            )
        assert host_buffer.memory is not None
        self._progress.advance(f"saving step {request.step} in the trainer", OF_TRAINER)
        with memoryview(host_buffer.memory) as memory, reporting_to(self._progress, OF_TRAINER):
            return execute_save(self._store, request, filling(memory), self._retention)

    def give_up(self) -> None:
        """Let what is under way fail."""
        self._gives_up = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """End the process, which has nothing left to do."""
        if self._process is not None:
            self._process.end()

    def _new_process(self) -> WriterProcess:
        setting = WriterProcessSettings(
            directory=str(self._store.directory),
            run_id=self._store.run_id,
            claim=self._store.claim_directory(),
            disk_type=type(self._store.disk),
            retention=self._retention,
            niceness=self._setting.niceness,
        )
        return WriterProcess(setting, self._host_buffers, self._setting.timeout_s, self._progress)
