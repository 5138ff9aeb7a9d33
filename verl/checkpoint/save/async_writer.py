"""CheckpointWriter: saves live tensors as a committed checkpoint, while training continues.

    save()         computes the layout and returns                            milliseconds
    copying        a thread copies the tensors into one of two host buffers   wait_copied() before weights change
    writing        the writer process writes, hashes, publishes, prunes     poll() returns the outcomes
    drain, close   wait for saves in progress

A writer process that dies is restarted, and the save is written from the host buffer, which still holds its bytes;
after a second death the save fails. No save is lost silently: each ends as a `SaveOutcome`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Literal

from verl.checkpoint.commit.store import CheckpointStore, SaveTransaction
from verl.checkpoint.retention import Retention
from verl.checkpoint.save.host_buffer import FAILED, WAIT_EVERY_S, HostBuffer, HostBufferPool, note_progress
from verl.checkpoint.save.save_request import SaveOutcome, SaveRequest, submit_failure
from verl.checkpoint.save.snapshot import Snapshot, lay_out_request
from verl.checkpoint.save.writer_process import END_TIMEOUT_S, START_TIMEOUT_S, WriterClient
from verl.errors import CheckpointWriteFailed, error_text
from verl.utils.progress import Progress, ProgressWatch

log = logging.getLogger(__name__)

NUM_COPY_THREADS = min(4, os.cpu_count() or 1)
CLOSE_TIMEOUT_S = 600.0
WRITER_TIMEOUT_S = 600.0


@dataclass(kw_only=True)
class _Job:
    """A save in progress."""

    request: SaveRequest
    snapshot: Snapshot | None
    host_buffer: HostBuffer
    began: float
    copied: threading.Event = field(default_factory=threading.Event)
    stall_s: float = 0.0
    copied_s: float = 0.0
    copy_error: Exception | None = None
    num_deaths_before: int = 0
    transaction: SaveTransaction | None = None


class CheckpointWriter:
    """Saves checkpoints of one trainer; docs/checkpoints.md has an example.

    Args:
        store: where checkpoints are published; the first save claims its directory.
        mode: `async` copies in a thread and writes in a process; `sync` does both in the caller's thread.
        retention: applied after every save.
        timeout_s: seconds without progress after which the writer process is treated as dead.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        mode: Literal["async", "sync"] = "async",
        retention: Retention | None = None,
        timeout_s: float = WRITER_TIMEOUT_S,
    ):
        self.store, self.mode = store, mode
        self._host_buffers = HostBufferPool(most=1 if mode == "sync" else 2)
        self._owner = os.getpid()
        self._progress, self._timeout_s = Progress(num_slots=2), timeout_s
        self._writer_client = WriterClient(
            store, self._host_buffers, retention, mode == "async", timeout_s, self._progress
        )
        self._to_copy: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._to_write: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._last: _Job | None = None
        self._changed = threading.Condition()
        self._outcomes: deque[SaveOutcome] = deque()
        self._num_under_way = 0
        self._is_open = True
        self._threads: list[threading.Thread] = []
        if mode == "async":
            for name, tasks in (("copy", self._to_copy), ("write", self._to_write)):
                thread = threading.Thread(target=_run_all, args=(tasks,), name=f"checkpoint_{name}", daemon=True)
                thread.start()
                self._threads.append(thread)
        atexit.register(self.close)

    # -- for the trainer ---------------------------------------------------------------------------------------------

    def prepare(self, request: SaveRequest) -> None:
        """Allocate memory for saves of this size and start the process, in the background, so that the first save takes
        no longer than later ones. Optional; copies and writes nothing."""
        self.reserve(lay_out_request(request)[0].num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Equivalent of `prepare` for saves of `num_bytes` bytes."""
        if self.mode == "async" and (host_buffer := self._host_buffers.acquire(None)) is not None:
            self._to_copy.put(partial(self._reserve, host_buffer, num_bytes))

    def save(
        self, request: SaveRequest, transaction: SaveTransaction | None = None, began: float | None = None
    ) -> None:
        """Begin a save at a step boundary; waits while two are in progress. The tensors must not change before
        `wait_copied` has returned.

        Args:
            transaction: the transaction of a save that several processes write, opened by the caller and closed here.
            began: start time of the save, from `time.perf_counter`.
        Raises:
            ValueError, TypeError: the request is invalid; see `lay_out_request`.
            CheckpointWriteFailed: an earlier save, for which this one waits, makes no progress.
        """
        began = time.perf_counter() if began is None else began
        assert self._is_open, "this writer was closed"
        request, pieces = lay_out_request(request)
        snapshot = Snapshot(pieces, NUM_COPY_THREADS)
        host_buffer = self._host_buffers.acquire(self._watch(), request.num_bytes)
        if host_buffer is None:
            if transaction is not None:
                transaction.abort()
            raise self._stands_still()
        job = self._last = _Job(
            request=request, snapshot=snapshot, host_buffer=host_buffer, began=began, transaction=transaction
        )
        with self._changed:
            self._num_under_way += 1
        if self.mode == "async":
            job.stall_s = time.perf_counter() - began
            self._to_copy.put(partial(self.copy, job))
        else:
            try:
                self.copy(job)
            finally:
                while not self._to_write.empty() and (task := self._to_write.get()) is not None:
                    task()

    def wait_copied(self) -> None:
        """Wait until the tensors of all saves are copied; call this before the next optimizer step."""
        if self._last is not None:
            self._last.copied.wait()  # saves are copied one after another

    def poll(self, raises: bool = True) -> list[SaveOutcome]:
        """Outcomes of the saves that ended since the last call.

        Args:
            raises: raise the error of the first failed save; the next call reports the other outcomes.
        Raises:
            CheckpointError: a save failed and was not published.
        """
        with self._changed:
            failed = next((outcome for outcome in self._outcomes if outcome.error is not None), None)
            if raises and failed is not None:
                self._outcomes.remove(failed)
                assert failed.error is not None
                raise failed.error
            outcomes = list(self._outcomes)
            self._outcomes.clear()
        return outcomes

    def drain(self, raises: bool = True) -> list[SaveOutcome]:
        """Wait for every save under way, as long as it makes progress, then `poll`.

        Raises:
            CheckpointWriteFailed: a save makes no progress; it continues.
        """
        with self._changed:
            if not self._wait_for_all(self._watch()):
                raise self._stands_still()
        return self.poll(raises)

    def _watch(self, timeout_s: float | None = None) -> ProgressWatch:
        """Timeout for saves in progress; the default is longer than replacing a hanging process twice."""
        limit_s = 2 * self._timeout_s + START_TIMEOUT_S + END_TIMEOUT_S if timeout_s is None else timeout_s
        return ProgressWatch(self._progress, limit_s, poll_interval_s=2 * WAIT_EVERY_S)

    def _wait_for_all(self, watch: ProgressWatch) -> bool:
        """Wait, with `_changed` held, until no save is in progress; False if they stop making progress."""
        pause_s = min(WAIT_EVERY_S, watch.timeout_s)
        while not self._changed.wait_for(lambda: self._num_under_way == 0, pause_s):
            if watch.is_overdue:
                return False
        return True

    def _stands_still(self) -> CheckpointWriteFailed:
        description = self._watch().describe(self.process_id)
        return CheckpointWriteFailed(f"a save in {self.store.directory} {description}. Does the disk answer?")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish the saves in progress, end the process and free the memory. Idempotent.

        Failures that `poll` has not returned are logged again.

        Args:
            timeout_s: seconds without progress after which the saves are abandoned.
        """
        if not self._is_open or os.getpid() != self._owner:
            return
        self._is_open = False
        atexit.unregister(self.close)
        with self._changed:
            if not self._wait_for_all(self._watch(timeout_s)):
                log.error("a save in %s was given up after %s s without progress", self.store.directory, timeout_s)
                self._writer_client.give_up()
        self._to_copy.put(None)
        self._to_write.put(None)
        for thread in self._threads:
            thread.join(timeout=END_TIMEOUT_S)
        self._writer_client.end()
        self._last = None
        self._host_buffers.release()
        if not any(thread.is_alive() for thread in self._threads):
            self._progress.close()
        for outcome in self._outcomes:
            if outcome.error is not None:
                log.error("step %d was never saved: %s", outcome.step, outcome.error)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def num_under_way(self) -> int:
        """Number of saves in progress."""
        return self._num_under_way

    @property
    def process_id(self) -> int | None:
        """Id of the writer process; None if it is not running."""
        return self._writer_client.process_id

    # -- in threads ---------------------------------------------------------------------------------------------------

    def _reserve(self, host_buffer: HostBuffer, num_bytes: int) -> None:
        try:
            host_buffer.fit(num_bytes)
        except OSError as error:  # the save itself will report it
            log.warning("no memory could be allocated for saving yet: %s", error)
        finally:
            self._host_buffers.give_back(host_buffer)
        self._to_write.put(self._writer_client.prepare)

    def copy(self, job: _Job) -> None:
        """Fill the job's host buffer. The writer already has it and reads as far as it is filled."""
        assert job.snapshot is not None
        memory = None
        try:
            memory = job.host_buffer.fit(job.request.num_bytes)
            note_progress(memory, 0)
            self._to_write.put(partial(self._write, job))
            job.snapshot.run(job.host_buffer, job.request.num_bytes)
        except BaseException as error:  # reported by poll; Ctrl-C occurs only without a thread
            job.copy_error = error if isinstance(error, Exception) else _interrupted(job)
            if memory is None:
                self._end(job, error=job.copy_error)
            else:
                note_progress(memory, FAILED)
            if not isinstance(error, Exception) and not self._threads:  # a thread has more saves to copy
                raise
        finally:
            job.snapshot = None  # the tensors may be freed
            job.copied_s = time.perf_counter() - job.began
            job.copied.set()

    def _write(self, job: _Job) -> None:
        job.num_deaths_before = self._writer_client.num_deaths
        outcome, failure = None, None
        try:
            outcome = self._writer_client.carry_out(job.request, job.host_buffer)
        except BaseException as error:  # the same
            failure = error if isinstance(error, Exception) else _interrupted(job)
            if not isinstance(error, Exception) and not self._threads:
                raise
        finally:
            job.copied.wait()
            self._end(job, outcome, job.copy_error or failure)
        if outcome is not None and outcome.prune_error:
            log.error("checkpoints were not pruned: %s", outcome.prune_error)

    def _end(self, job: _Job, outcome: SaveOutcome | None = None, error: Exception | None = None) -> None:
        if error is not None:
            log.error("the checkpoint of step %d failed: %s", job.request.step, error)
        if error is not None and job.request.multi_writer is not None and not job.request.multi_writer.commits:
            reason = error_text(error)
            submit_failure(self.store.disk, job.request.multi_writer.directory, job.request.multi_writer.name, reason)
        if job.transaction is not None:
            job.transaction.abort()  # after publication only the lock remains
        self._host_buffers.give_back(job.host_buffer)
        total_s = time.perf_counter() - job.began
        if outcome is None or error is not None:
            outcome = SaveOutcome(step=job.request.step, tag=job.request.tag, error=error)
        outcome = replace(
            outcome, stall_s=total_s if self.mode == "sync" else job.stall_s, copied_s=job.copied_s, total_s=total_s,
            num_deaths=self._writer_client.num_deaths - job.num_deaths_before,
        )  # fmt: skip
        with self._changed:
            self._num_under_way -= 1
            self.note(outcome)

    def note(self, outcome: SaveOutcome) -> None:
        """Queue an outcome for `poll`, such as that of a save that could not begin."""
        with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()


def _run_all(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run the tasks of a queue until None."""
    while (task := tasks.get()) is not None:
        task()


def _interrupted(job: _Job) -> CheckpointWriteFailed:
    return CheckpointWriteFailed(f"the save of step {job.request.step} was interrupted")
