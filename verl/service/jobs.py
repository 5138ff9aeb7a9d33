"""The work of a training service: requests of a model in order, samples of several requests as one batch, results.

    handlers (any thread) ── add ──> Jobs ──> one thread that computes ──> Result, fetched by its id

The requests of a model have numbers, and run in their order: one that comes early waits for those before it. Requests
of several models take turns. Sample requests that are there together and sample alike are one batch.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl.errors import ConfigError, VerlError

_log = logging.getLogger(__name__)

KEPT_S = 120.0  # that a result is kept after it was fetched: its answer may have been lost
MAX_SAMPLES = 512  # of one batch
MAX_WAITING = 4096  # sample requests; more are refused for a while


class Busy(VerlError, RuntimeError):
    """Too many requests wait."""


@dataclass
class Result:
    """The result of a request, or its failure.

    Attributes:
        content: JSON values, or bytes of a protobuf.
        error, category: of a failure: what the client did (`user`), or the service (`server`).
    """

    content: Any = None
    error: str | None = None
    category: Literal["user", "server"] = "server"
    done: threading.Event = field(default_factory=threading.Event)
    owner: str = ""
    fetched_at: float | None = None

    def fail(self, error: BaseException) -> None:
        is_user = isinstance(error, ConfigError | VerlError)
        if not is_user:
            _log.error("A request failed.", exc_info=error)
        self.error = str(error) if is_user else f"{type(error).__name__}: {error}"
        self.category = "user" if is_user else "server"
        self.done.set()


@dataclass
class SampleJob:
    """A sample request.

    Attributes:
        kind: requests of one kind may be one batch.
        count: of samples.
        request: for the function that computes.
    """

    kind: Hashable
    count: int
    request: Any
    result: Result


@dataclass
class _Model:
    next_number: int = 1
    early: dict[int, tuple[Callable[[], Any], Result]] = field(default_factory=dict)


class Jobs:
    """Requests and results of a service.

    Args:
        sample: computes the contents of a batch of sample requests of one kind.
    """

    def __init__(self, sample: Callable[[Hashable, Sequence[Any]], Sequence[Any]]):
        self._sample, self._changed = sample, threading.Condition()
        self._results: dict[str, Result] = {}
        self._models: dict[str, _Model] = {}
        self._ready: collections.deque[tuple[Callable[[], Any], Result]] = collections.deque()
        self._samples: list[SampleJob] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training service", daemon=True)
        self._thread.start()

    def add(self, request_id: str, owner: str, work: Callable[[], Any], model: str = "", number: int = 0) -> str:
        """Queue work; a request that was added before is not added again, since clients repeat what they got no answer
        to.

        Args:
            request_id: under which its result is fetched.
            owner: session that it belongs to.
            model, number: the model whose requests run in order, and its place from 1; 0 runs it as it comes.
        """
        with self._changed:
            if request_id in self._results:
                return request_id
            result = self._results[request_id] = Result(owner=owner)
            if not number:
                self._ready.append((work, result))
            else:
                state = self._models.setdefault(model, _Model())
                if number < state.next_number:
                    result.fail(
                        ConfigError(f"seq_id is {number}: this model has done {state.next_number - 1} already.")
                    )
                state.early[number] = work, result
                while state.next_number in state.early:
                    self._ready.append(state.early.pop(state.next_number))
                    state.next_number += 1
            self._changed.notify_all()
        return request_id

    def add_sample(self, request_id: str, owner: str, kind: Hashable, count: int, request: Any) -> str:
        """Queue a sample request.

        Raises:
            Busy: too many wait.
        """
        with self._changed:
            if request_id in self._results:
                return request_id
            if len(self._samples) >= MAX_WAITING:
                raise Busy(f"{MAX_WAITING} sample requests wait: ask again later.")
            result = self._results[request_id] = Result(owner=owner)
            self._samples.append(SampleJob(kind, count, request, result))
            self._changed.notify_all()
        return request_id

    def result(self, request_id: str) -> Result | None:
        with self._changed:
            return self._results.get(request_id)

    def cancel(self, request_id: str) -> None:
        """Drop a sample request that has not begun."""
        with self._changed:
            result = self._results.get(request_id)
            waiting = [job for job in self._samples if job.result is result]
            self._samples = [job for job in self._samples if job.result is not result]
        for job in waiting:
            job.result.fail(ConfigError("the request was cancelled."))

    def forget(self, owner: str) -> None:
        """Drop what a session has queued, and its results."""
        with self._changed:
            dropped = {name: x for name, x in self._results.items() if x.owner == owner}
            for name in dropped:
                del self._results[name]
            gone = {id(x) for x in dropped.values()}
            self._samples = [job for job in self._samples if id(job.result) not in gone]
            self._ready = collections.deque(x for x in self._ready if id(x[1]) not in gone)
        for result in dropped.values():
            if not result.done.is_set():
                result.fail(ConfigError("the session has ended."))

    def sweep(self) -> None:
        """Drop results that were fetched a while ago."""
        with self._changed:
            before = time.monotonic() - KEPT_S
            for name in [n for n, x in self._results.items() if x.fetched_at is not None and x.fetched_at < before]:
                del self._results[name]

    def run_now(self, work: Callable[[], Any]) -> Any:
        """Run work between others, in the thread that computes; returns what it returns, raises what it raises."""
        done: list[Any] = []
        raised: list[BaseException] = []

        def kept() -> None:
            try:
                done.append(work())
            except Exception as error:  # noqa: BLE001 - raised again below
                raised.append(error)

        result = Result()
        with self._changed:
            self._ready.append((kept, result))
            self._changed.notify_all()
        result.done.wait()
        if raised:
            raise raised[0]
        return done[0]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        samples_next = False
        while True:
            with self._changed:
                while not (self._ready or self._samples or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                takes_samples = bool(self._samples) and (samples_next or not self._ready)
                batch = self._take_samples() if takes_samples else []
                job = None if takes_samples else self._ready.popleft()
            samples_next = not takes_samples
            if job is None:
                self._compute_samples(batch)
                continue
            work, result = job
            if result.done.is_set():
                continue
            try:
                result.content = work()
                result.done.set()
            except Exception as error:  # noqa: BLE001 - told to the client
                result.fail(error)

    def _take_samples(self) -> list[SampleJob]:
        kind, batch, count = self._samples[0].kind, list[SampleJob](), 0
        for job in self._samples:
            if job.kind == kind and (not batch or count + job.count <= MAX_SAMPLES):
                batch.append(job)
                count += job.count
        taken = {id(job) for job in batch}
        self._samples = [job for job in self._samples if id(job) not in taken]
        return batch

    def _compute_samples(self, batch: list[SampleJob]) -> None:
        try:
            contents = self._sample(batch[0].kind, [job.request for job in batch])
        except Exception as error:  # noqa: BLE001 - told to the client
            if len(batch) > 1:  # one of them may be at fault
                for job in batch:
                    self._compute_samples([job])
                return
            batch[0].result.fail(error)
            return
        for job, content in zip(batch, contents, strict=True):
            job.result.content = content
            job.result.done.set()
