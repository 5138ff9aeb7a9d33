"""A pool of worker processes that score one sample at a time; a call that hangs or crashes affects its process only.

driver ──sample──> worker 0, worker 1, ...      one sample at a time each
       <─score───
       ──SIGKILL─> after timeout_s; a new worker takes its place

The time in which a worker was ready to run but had no processor does not count: the sample did not take it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, cast

import numpy as np

from verl.errors import NonFiniteRewardError, RewardError
from verl.protocol import DataProto
from verl.protocol.provenance import Source
from verl.protocol.user_function import Signature
from verl.rewards.base import (
    LARGEST,
    Reward,
    RewardResult,
    check_columns,
    checked_result,
    refuse_missing_arguments,
    reward_error,
    texts_of,
)
from verl.rewards.pool_worker import PoolSettings
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.process import ChildProcess
from verl.utils.progress import Progress, ProgressWatch, StoppedTime, is_stopped, processor_wait_s, report

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # the user's module may import large packages
GRACE_S = 0.5  # in which a late worker writes its stack trace before it is killed
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class PoolResult:
    """The score of a sample, or a description of its failure.

    Attributes:
        is_blameless: whether the failure was not caused by the sample, but by a suspended worker.
        was_raised: whether the function raised; False for a time-out or a process that ended.
    """

    score: Any = None
    failure: str | None = None
    is_blameless: bool = False
    was_raised: bool = False


class ProcessPool:
    """Worker processes that call one function.

    Args:
        path: of the function, see `verl.protocol.user_function.load_function`.
        kwargs: further keyword arguments of every call.
        timeout_s: deadline of one sample, from when a worker takes it, without the time that the worker waited for a
            processor.
        num_workers: number of processes.
        preloaded: modules that the function imports when it is called; a worker imports them before its first sample.
        whole_batch: a sample is a whole batch, as keyword arguments or as a DataProto, and the result may be any
            picklable object; otherwise it must be one number.
    Attributes:
        source, signature: of the function, as imported by a worker.
    Raises:
        RewardError: the function cannot be imported in a worker.
    """

    source: Source
    signature: Signature

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        timeout_s: float,
        num_workers: int,
        preloaded: Sequence[str] = (),
        whole_batch: bool = False,
    ):
        self.path, self.timeout_s = path, timeout_s
        module, _, name = path.rpartition(":")
        if module.endswith(".py"):  # the processes start in another working directory
            path = f"{os.path.abspath(module)}:{name}"
        self._setting = PoolSettings(path, dict(kwargs), timeout_s, tuple(preloaded), whole_batch, trace=-1)
        self.workers: list[_PoolProcess] = []
        atexit.register(self.close)
        try:
            for _ in range(num_workers):
                self.workers.append(_PoolProcess(self._setting))
            for number, worker in enumerate(self.workers):
                self.workers[number] = self._ready(worker)
            self.source, self.signature = self.workers[0].facts
        except BaseException:
            self.close()
            raise

    def rate(self, samples: Sequence[Any], stop_at_failure: bool = False) -> list[PoolResult | None]:
        """Score every sample by one call each.

        Args:
            samples: keyword arguments of each call.
            stop_at_failure: start no further sample after a failure; the result of those is None.
        """
        if not self.workers:
            raise RewardError("The workers of this reward were stopped: close() was called.")
        outcomes: list[PoolResult | None] = [None] * len(samples)
        waiting = _packed(samples, outcomes, stop_at_failure)
        busy: dict[_PoolProcess, tuple[int, bytes]] = {}
        again: deque[tuple[int, bytes]] = deque()  # samples whose worker was suspended
        retried: set[int] = set()
        try:
            while True:
                for number, worker in enumerate(self.workers):
                    if worker in busy or (handed := again.popleft() if again else next(waiting, None)) is None:
                        continue
                    worker = self.workers[number] = self._hand_over(worker, handed[1])
                    busy[worker] = handed
                if not busy:
                    return outcomes
                for worker, outcome in self._finished(list(busy)):
                    report()
                    index, message = busy.pop(worker)
                    if outcome.is_blameless and index not in retried:
                        _log.warning("path is %r: %s. A new process takes the sample.", self.path, outcome.failure)
                        retried.add(index)
                        again.append((index, message))
                        continue
                    outcomes[index] = outcome
                    if stop_at_failure and outcome.failure is not None:
                        waiting.close()
        finally:
            for worker in busy:  # interrupted: nobody waits for their results
                worker.kill()

    def close(self) -> None:
        """Kill the workers; calling it again does nothing."""
        atexit.unregister(self.close)
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.kill()

    def _hand_over(self, worker: _PoolProcess, message: bytes) -> _PoolProcess:
        """Send a sample to a worker, or to a new one if it has ended. Returns the worker that has the sample."""
        if not worker.ended:
            if worker.send(message):
                return worker
            _log.warning("path is %r: a worker process does not accept a sample%s", self.path, worker.state())
        worker.kill()
        worker = self._ready(_PoolProcess(self._setting))
        if not worker.send(message):
            worker.kill()
            raise RewardError(f"path is {self.path!r}: a new worker process ended right after its start.")
        return worker

    def _ready(self, worker: _PoolProcess) -> _PoolProcess:
        """Wait until a worker has imported the function; one that was suspended meanwhile is replaced once.

        Raises:
            RewardError: the function cannot be imported.
        """
        try:
            if not worker.await_ready(self.path, may_be_stopped=True):
                _log.warning("path is %r: a worker process was suspended while it started, and is replaced.", self.path)
                worker.kill()
                worker = _PoolProcess(self._setting)
                worker.await_ready(self.path)
        except BaseException:
            worker.kill()
            raise
        return worker

    def _finished(self, busy: list[_PoolProcess]) -> Iterator[tuple[_PoolProcess, PoolResult]]:
        """Wait for workers that answered, ended or timed out, and yield each with its result."""
        left = min(self.timeout_s - worker.spent_s for worker in busy)
        channels: list[Any] = [worker.channel for worker in busy]  # anything with fileno() can be waited for
        wait(channels, timeout=max(0.0, min(left, LOOK_EVERY_S)))
        for worker in busy:
            if worker.channel.has_message():  # asked now: it may have answered while another one was killed
                yield worker, self._outcome(worker)
            elif worker.spent_s >= self.timeout_s:
                state, stands_still = worker.state(), not worker.has_taken or is_stopped(worker.pid)
                worker.kill(with_trace=True)
                yield worker, self._late(worker, state, stands_still)

    def _outcome(self, worker: _PoolProcess) -> PoolResult:
        """The answer of a worker, or why it closed its connection."""
        try:
            kind, detail = worker.channel.receive()
        except ChannelClosed:
            words = worker.exit_words()
            if worker.trace():  # it has outlived its limit unjudged: the whole run was suspended for a while
                return self._late(worker, is_blameless=True)
            return PoolResult(failure=f"the process ended with {words}")
        return PoolResult(score=detail) if kind == "score" else PoolResult(failure=detail, was_raised=True)

    def _late(self, worker: _PoolProcess, state: str = "", is_blameless: bool = False) -> PoolResult:
        lines = re.findall(rf'File "{re.escape(self.source.file)}", (line \d+) in (\S+)', worker.trace())
        where = f"\n  It was at {lines[0][0]}, in {lines[0][1]}()" if lines else ""
        return PoolResult(
            failure=f"no answer within timeout_s, which is {self.timeout_s:g}: its process was killed{state}{where}",
            is_blameless=is_blameless,
        )


class _PoolProcess:
    """A worker process, its connection, and the file for its stack trace at a time-out."""

    facts: tuple[Source, Signature]

    def __init__(self, setting: PoolSettings):
        self.ended = False
        self._progress, self._count, self._waited_s = Progress(num_slots=1), 0, 0.0
        self._timeout_s = setting.timeout_s
        self._watch = ProgressWatch(self._progress, setting.timeout_s, look_every_s=2 * LOOK_EVERY_S)
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._child = ChildProcess(
            "verl.rewards.pool_worker",
            self._progress,
            environment={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ,
            files=[self._trace.fileno()],
            is_in_own_session=True,
            stuck_s=setting.timeout_s + GRACE_S,
        )
        self.channel = self._child.channel
        with contextlib.suppress(ChannelClosed):  # it has ended already: await_ready reports that
            self._child.begin(replace(setting, trace=self._trace.fileno()))

    def await_ready(self, path: str, may_be_stopped: bool = False) -> bool:
        """Wait until the function is imported.

        Returns:
            False if the process was suspended for longer than `timeout_s` and `may_be_stopped`; else True.
        """
        deadline, stopped = time.monotonic() + START_TIMEOUT_S, StoppedTime(LOOK_EVERY_S)
        while not (is_heard := self.channel.has_message(LOOK_EVERY_S)) and time.monotonic() < deadline:
            if stopped.of(self.pid) > self._timeout_s:
                if may_be_stopped:
                    return False
                break
        kind, detail = "error", f"it did not finish within {START_TIMEOUT_S:g} s, or is suspended{self.state()}"
        if is_heard:
            try:
                kind, detail = self.channel.receive()
            except ChannelClosed:
                detail = f"the process ended with {self.exit_words()}"
        if kind != "ready":
            raise RewardError(f"path is {path!r}: a worker process could not import it: {detail}.")
        self.facts = cast(tuple[Source, Signature], detail)
        return True

    @property
    def pid(self) -> int:
        return self._child.pid

    def state(self) -> str:
        """State of the process by the operating system, to append to a message."""
        state = self._child.state()
        return f" ({state})" if state else ""

    @property
    def has_taken(self) -> bool:
        """Whether it has received the sample that was sent last."""
        return self._progress.count(0) != self._count

    def send(self, message: bytes) -> bool:
        """Send a sample; False if the worker has ended or does not receive."""
        self._count, self._waited_s = self._progress.count(0), processor_wait_s(self.pid)
        try:
            self.channel.send(message)
        except ChannelClosed:
            return False
        self._watch.restart()
        return True

    @property
    def spent_s(self) -> float:
        """Seconds that the current sample has taken, without those in which the driver was suspended or the worker
        waited for a processor."""
        return self._watch.idle_s - max(0.0, processor_wait_s(self.pid) - self._waited_s)

    def trace(self) -> str:
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")

    def kill(self, with_trace: bool = False) -> None:
        """Kill the process and all processes that it started.

        Args:
            with_trace: let it write its stack trace first; a suspended one writes none.
        """
        if self.ended:
            return
        self.ended = True
        if with_trace:
            self._child.request_stack()
            deadline = time.monotonic() + GRACE_S
            while not self.trace() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.01)  # it may be written in two parts
        self._child.kill()
        self._progress.close()

    def exit_words(self) -> str:
        self._child.await_exit(GRACE_S)
        words = self._child.describe_exit() or "its connection closed"
        self.kill()
        return words


def _packed(
    samples: Sequence[Any], outcomes: list[PoolResult | None], stop_at_failure: bool
) -> Generator[tuple[int, bytes], None, None]:
    """Yield index and pickled bytes of each sample; one that cannot be pickled gets a failure in `outcomes`."""
    for index, sample in enumerate(samples):
        try:
            message = pickle.dumps(sample)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            fault = f"a column cannot be sent to a worker process ({type(error).__name__}: {error})"
            outcomes[index] = PoolResult(failure=fault)
            if stop_at_failure:
                return
            continue
        yield index, message


EXPECTED = "one finite number"


class SampleReward(Reward):
    """A reward that calls a function once for each response, `num_workers` at a time. `close` ends its processes.

    Args:
        path: a function of `prompt`, `response` and columns of the data; see `RewardFunction`.
        kwargs: further keyword arguments of every call.
        timeout_s: deadline of one sample.
        num_workers: number of processes.
        error_score: score of a sample that fails; None raises instead.
        columns: argument name -> column name, where the two differ.
        preloaded: modules that the function imports when it is called.
    Raises:
        RewardError: a worker cannot import the function, or it does not take `prompt` and `response`.
    """

    rates_ahead = rates_groups = True

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        num_workers: int,
        error_score: float | None,
        columns: Mapping[str, str] | None = None,
        preloaded: Sequence[str] = (),
    ):
        self.kwargs, self.error_score, self._renamed = dict(kwargs), error_score, dict(columns or {})
        self.pool = ProcessPool(path, self.kwargs, timeout_s, num_workers, preloaded)
        self.function: Any = self.pool.source
        self._accepted = self.pool.signature.accepted
        try:
            refuse_missing_arguments(self._accepted, ("prompt", "response", *self.kwargs), self.function)
        except BaseException:
            self.pool.close()
            raise

    @property
    def producer(self) -> Callable:
        return self.function

    def rate_batch(self, batch: DataProto) -> RewardResult:
        """Score every response by a call of its own.

        Raises:
            RewardError: a sample failed and there is no `error_score` (the message names the first), or the function
                needs a column that the data lacks.
        """
        prompts, responses, columns = texts_of(batch)
        for argument, column in self._renamed.items():
            if column not in columns:
                present = ", ".join(columns) or "none"
                raise RewardError(f"The data has no column {column!r}, which the reward needs. Its columns: {present}.")
            columns[argument] = columns[column]
        check_columns(self._accepted, columns, ("prompt", "response", *self.kwargs), self.function)
        given = {"prompt": prompts, "response": responses, **columns}
        names = [name for name in given if self._accepted is None or name in self._accepted]
        samples = [{name: given[name][index] for name in names} for index in range(len(responses))]
        outcomes = self.pool.rate(samples, stop_at_failure=self.error_score is None)
        failures = {index: fault for index, outcome in enumerate(outcomes) if (fault := _failure(outcome)) is not None}
        if failures:
            numbers = [index for index in failures if (o := outcomes[index]) is not None and o.failure is None]
            self._report(failures, prompts, responses, numbers)
        scores = [
            self.error_score if index in failures or outcome is None else outcome.score
            for index, outcome in enumerate(outcomes)
        ]
        rating = checked_result(scores, prompts, responses, self.function)
        if self.error_score is not None:
            rating.parts["failed"] = np.array([float(index in failures) for index in range(len(scores))])
        return rating

    def close(self) -> None:
        self.pool.close()

    def _report(self, failures: dict[int, str], prompts: list[str], responses: list[str], numbers: list[int]) -> None:
        """Raise or warn. `numbers`: indices of failures whose score is a number that is not finite."""
        first = min(failures)
        error = reward_error(EXPECTED, failures[first], self.function, prompts, responses, first)
        if self.error_score is None:
            raise NonFiniteRewardError(str(error), numbers) if first in numbers else error
        _log.warning(
            "%d of %d samples failed and get error_score %g. The first of them:\n%s",
            len(failures), len(responses), self.error_score, error,
        )  # fmt: skip


def _failure(outcome: PoolResult | None) -> str | None:
    """Why a sample has no score; None if it has one, or was not started."""
    if outcome is None or outcome.failure is not None:
        return None if outcome is None else outcome.failure
    score = outcome.score["score"] if isinstance(outcome.score, dict) else outcome.score
    return None if score is None or abs(score) <= LARGEST else f"{score!r}"
