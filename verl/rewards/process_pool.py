"""A pool of worker processes that score one sample at a time; a call that hangs or crashes affects only its process.

driver ──sample──> worker 0, worker 1, ...      one sample at a time each
       <─score───
       ──SIGKILL─> after timeout_s; a new worker replaces it

Time in which a worker was ready to run but had no processor does not count towards the timeout.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, cast

import numpy as np

from verl.errors import RewardError, error_text
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
from verl.rewards.pool_worker import PoolSettings, file_digest
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.pool import PoolClosed, PooledChild, ProcessPool, StartFailed
from verl.utils.child_process.process import ChildProcess
from verl.utils.progress import Progress, ProgressWatch, processor_wait_s, report

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # the user's module may import large packages
GRACE_S = 0.5  # for a late worker to write its stack trace before it is killed
POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class PoolResult:
    """The score of a sample, or a description of its failure.

    Attributes:
        is_blameless: whether the failure was not caused by the sample, but by a worker that was suspended or ended
            before it.
    """

    score: Any = None
    failure: str | None = None
    is_blameless: bool = False


class FunctionPool:
    """Worker processes that call one function.

    Args:
        path: of the function, see `verl.protocol.user_function.load_function`.
        kwargs: further keyword arguments of every call.
        timeout_s: deadline of one sample, from when a worker takes it, excluding time that the worker waited for a
            processor.
        num_workers: number of processes.
        preloaded: modules that the function imports when called; a worker imports them before its first sample.
        whole_batch: a sample is a whole batch, as keyword arguments or as a DataProto, and the result may be any
            picklable object; otherwise it must be one number.
    Attributes:
        source, signature: of the function, as imported by a worker.
    Raises:
        RewardError: the function cannot be imported in a worker.
    """

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        timeout_s: float,
        num_workers: int,
        preloaded: Sequence[str] = (),
        whole_batch: bool = False,
    ):
        self.path, self._num_workers = path, num_workers
        module, _, name = path.rpartition(":")
        if module.endswith(".py"):  # the processes start in another working directory
            path = f"{os.path.abspath(module)}:{name}"
        setting = PoolSettings(path, dict(kwargs), tuple(preloaded), whole_batch, file_digest(path), trace=-1)
        self._processes = ProcessPool(lambda: _Worker(self.path, setting, timeout_s), num_workers, starters=num_workers)
        try:
            with contextlib.ExitStack() as all_of_them:
                workers = [all_of_them.enter_context(self._processes.lend()) for _ in range(num_workers)]
            self.source, self.signature = workers[0].facts
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[_Worker]:
        return list(self._processes.loans)

    def score(self, samples: Sequence[Any], stop_at_failure: bool = False) -> list[PoolResult | None]:
        """Score each sample by a separate call.

        Args:
            samples: keyword arguments of each call.
            stop_at_failure: start no further samples after a failure; their result is None.
        """
        stop = Event()

        def score(sample: Any) -> PoolResult | None:
            is_repeated = False
            while not stop.is_set():
                with contextlib.suppress(TimeoutError), self._processes.lend(POLL_INTERVAL_S) as worker:
                    outcome = worker.call(sample)
                    if outcome.is_blameless and not is_repeated:
                        _log.warning("path is %r: %s. It is tried again.", self.path, outcome.failure)
                        is_repeated = True
                        continue
                    if stop_at_failure and outcome.failure is not None:
                        stop.set()
                    return outcome
            return None

        with ThreadPoolExecutor(self._num_workers, "verl rewards") as threads:
            futures = [threads.submit(score, sample) for sample in samples]
            try:
                for future in as_completed(futures):
                    future.result()
                    report()
                return [future.result() for future in futures]
            except PoolClosed:
                raise RewardError("The workers of this reward were stopped: close() was called.") from None
            except BaseException:  # interrupted: the other results are not needed
                stop.set()
                self._processes.kill_lent()
                raise
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        self._processes.close()


class _Worker(PooledChild):
    """A worker process, and the file for its stack trace at a time-out."""

    facts: tuple[Source, Signature]

    def __init__(self, path: str, setting: PoolSettings, timeout_s: float):
        self._path, self._timeout_s = path, timeout_s
        self._progress = Progress(num_slots=1)
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        child = ChildProcess(
            "verl.rewards.pool_worker",
            self._progress,
            environment={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ,
            files=[self._trace.fileno()],
            is_in_own_session=True,
            is_killed_with_parent=True,  # works even in code that never releases the interpreter
            is_marked=True,  # a program that the function runs in a session of its own ends too
            stuck_s=timeout_s + GRACE_S,
        )
        super().__init__(child, START_TIMEOUT_S)
        with contextlib.suppress(ChannelClosed):  # already ended: await_ready reports it
            child.begin(replace(setting, trace=self._trace.fileno()))

    def await_ready(self) -> None:
        """Wait for the worker; raises RewardError if the function cannot be imported."""
        try:
            kind, detail = self.first_message()
        except StartFailed as error:
            kind, detail = "error", error
        if kind != "ready":
            raise RewardError(f"path is {self._path!r}: a worker process could not import it: {detail}.")
        self.facts = cast(tuple[Source, Signature], detail)

    def call(self, sample: Any) -> PoolResult:
        """Score a sample. The process is killed if it does not answer in time."""
        try:
            message = pickle.dumps(sample)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            return PoolResult(failure=f"a column cannot be sent to a worker process ({error_text(error)})")
        count, watch = self._progress.count(0), _SampleWatch(self._progress, self._timeout_s, self.pid)
        try:
            self.channel.send(message)
            kind, detail = self.channel.receive(watch=watch)
        except (TimeoutError, ChannelClosed) as error:
            has_taken, is_late = self._progress.count(0) != count, isinstance(error, TimeoutError)
            is_blameless = not has_taken or (is_late and self.child.is_stopped())
            ended = f"does not receive{self.state()}" if self.child.is_stopped() else f"ended with {self.exit_words()}"
            words = self._late_words() if is_late else f"the process {ended}"
            self.kill()
            return PoolResult(failure=words, is_blameless=is_blameless)
        return PoolResult(score=detail) if kind == "score" else PoolResult(failure=detail)

    def _late_words(self) -> str:
        """Describe a process that gives no answer in time: its state, and its line in the user's file."""
        state, deadline = self.state(), time.monotonic() + GRACE_S
        self.child.request_stack()
        while not (trace := self._trace_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.01)  # the trace may be written in two parts
        lines = re.findall(rf'File "{re.escape(self.facts[0].file)}", (line \d+) in (\S+)', self._trace_text() or trace)
        where = f"\n  It was at {lines[0][0]}, in {lines[0][1]}()" if lines else ""
        return f"no answer within timeout_s, which is {self._timeout_s:g}: its process was killed{state}{where}"

    def _trace_text(self) -> str:
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")


class _SampleWatch(ProgressWatch):
    """The deadline of a sample: counts the time since a worker took it, excluding time in which the worker waited for a
    processor or this process was suspended."""

    def __init__(self, progress: Progress, timeout_s: float, pid: int):
        self._pid, self._waited_s = pid, processor_wait_s(pid)
        super().__init__(progress, timeout_s, poll_interval_s=2 * POLL_INTERVAL_S)

    @property
    def idle_s(self) -> float:
        return super().idle_s - max(0.0, processor_wait_s(self._pid) - self._waited_s)


EXPECTED = "one finite number"


class SampleReward(Reward):
    """A reward that calls a function once for each response, `num_workers` at a time. `close` ends its processes.

    Args:
        path: a function of `prompt`, `response` and columns of the data; see `RewardFunction`.
        kwargs: further keyword arguments of every call.
        timeout_s: deadline of one sample.
        num_workers: number of processes.
        error_score: score of a sample that fails; None raises instead.
        columns: argument name -> column name, if they differ.
        preloaded: modules that the function imports when called.
    Raises:
        RewardError: a worker cannot import the function, or the function does not take `prompt` and `response`.
    """

    scores_ahead = scores_groups = True

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
        self.pool = FunctionPool(path, self.kwargs, timeout_s, num_workers, preloaded)
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

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score each response by a separate call.

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
        outcomes = self.pool.score(samples, stop_at_failure=self.error_score is None)
        failures = {index: fault for index, outcome in enumerate(outcomes) if (fault := _failure(outcome)) is not None}
        if failures:
            self._report(failures, prompts, responses)
        scores = [
            self.error_score if index in failures or outcome is None else outcome.score
            for index, outcome in enumerate(outcomes)
        ]
        result = checked_result(scores, prompts, responses, self.function)
        if self.error_score is not None:
            result.parts["failed"] = np.array([float(index in failures) for index in range(len(scores))])
        return result

    def close(self) -> None:
        self.pool.close()

    def _report(self, failures: dict[int, str], prompts: list[str], responses: list[str]) -> None:
        """Raise or warn."""
        first = min(failures)
        error = reward_error(EXPECTED, failures[first], self.function, prompts, responses, first)
        if self.error_score is None:
            raise error
        _log.warning(
            "%d of %d samples failed and get error_score %g. The first of them:\n%s",
            len(failures), len(responses), self.error_score, error,
        )  # fmt: skip


def _failure(outcome: PoolResult | None) -> str | None:
    """Why a sample has no score; None if it has one or was not started."""
    if outcome is None or outcome.failure is not None:
        return None if outcome is None else outcome.failure
    score = outcome.score["score"] if isinstance(outcome.score, dict) else outcome.score
    return None if score is None or abs(score) <= LARGEST else f"{score!r}"
