"""The work of a training service: requests of a model in order, samples of several requests as one batch, results.

    handlers (any thread) ── add ──> Jobs ──> one thread that computes ──> Job.future, fetched by the job's id

The requests of a model have numbers, and run in their order: one that comes early waits for those before it. Requests
of several models take turns. Sample requests that are there together and sample alike are one batch.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError, VerlError

KEPT_S = 120.0  # that a result is kept after it was fetched: its answer may have been lost
UNFETCHED_S = 3600.0  # that a result is kept for which nobody comes
MISSING_S = 60.0  # that requests of a model wait for one with a smaller number that never came
MAX_SAMPLES = 512  # of one batch
GATHER_S = 0.005  # a batch begins when no further sample request comes for so long
MAX_WAITING = 4096  # sample requests, and others of one session; more are refused for a while


class Busy(VerlError, RuntimeError):
    """Too many requests wait."""


@dataclass(eq=False)
class Job:
    """A request and its result.

    Attributes:
        owner: session that it belongs to.
        work: computes the result.
        kind, request, num_samples: of a sample request, which has no `work`; those of one kind may be one batch.
    """

    owner: str
    work: Callable[[], Any] | None = None
    kind: Hashable = None
    request: Any = None
    num_samples: int = 0
    is_sample: bool = False
    future: Future[Any] = field(default_factory=Future)
    done_at: float | None = None
    fetched_at: float | None = None

    def run(self) -> None:
        """Compute the result, and free what it was computed from."""
        work, self.work = self.work, None
        assert work is not None
        try:
            self.finish(work())
        except BaseException as error:  # noqa: BLE001 - told to the client; also a panic of a library in Rust
            self.finish(error=error)

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        self.work = self.request = None
        self.done_at = time.monotonic()
        self.future.set_result(result) if error is None else self.future.set_exception(error)


@dataclass
class _Order:
    next_number: int = 1
    early: dict[int, Job] = field(default_factory=dict)
    waits_since: float = 0.0


class Jobs:
    """Requests and results of a service.

    Args:
        sample: results of a batch of sample requests of one kind.
        joins: whether sample requests are joined to batches; else each is computed alone, with the same bits each time.
    """

    def __init__(self, sample: Callable[[Hashable, Sequence[Any]], Sequence[Any]], joins: bool = True):
        self._sample, self._joins, self._changed = sample, joins, threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._orders: dict[str, _Order] = {}
        self._ready: collections.deque[Job] = collections.deque()
        self._samples: list[Job] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training service", daemon=True)
        self._thread.start()

    def add(self, job_id: str, job: Job, model: str = "", number: int = 0) -> str:
        """Queue a job, and return its id. One that was added before is not added again: clients repeat a request to
        which they got no answer.

        Args:
            model, number: the model whose requests run in order, and the place among them from 1; 0 for none.
        Raises:
            Busy: too many requests wait.
        """
        with self._changed:
            if job_id in self._jobs:
                return job_id
            self._refuse_closed()
            waiting = (
                self._samples if job.is_sample else [x for x in self._jobs.values() if x.owner == job.owner and x.work]
            )
            if len(waiting) >= MAX_WAITING:
                raise Busy(f"{MAX_WAITING} requests wait: ask again later.")
            order = self._orders.setdefault(model, _Order()) if number else None
            if order is not None and number < order.next_number:
                raise ConfigError(f"seq_id is {number}: this model has done {order.next_number - 1} already.")
            self._jobs[job_id] = job
            if job.is_sample:
                self._samples.append(job)
            elif order is None:
                self._ready.append(job)
            else:
                order.early[number] = job
                while order.next_number in order.early:
                    self._ready.append(order.early.pop(order.next_number))
                    order.next_number += 1
                order.waits_since = time.monotonic()
            self._changed.notify_all()
        return job_id

    def job(self, job_id: str) -> Job | None:
        with self._changed:
            return self._jobs.get(job_id)

    def forget(self, owner: str) -> None:
        """Drop the jobs of a session and their results; what waits is cancelled."""
        with self._changed:
            for job_id in [name for name, job in self._jobs.items() if job.owner == owner]:
                self._jobs.pop(job_id).future.cancel()
            self._orders = {name: x for name, x in self._orders.items() if not name.startswith(owner)}

    def sweep(self) -> None:
        """Drop results that were fetched a while ago, or for which nobody comes; fail what waits for a lost request."""
        now, lost = time.monotonic(), list[tuple[int, Job]]()
        with self._changed:
            for order in self._orders.values():
                if order.early and order.waits_since < now - MISSING_S:
                    lost += [(order.next_number, job) for job in order.early.values()]
                    order.next_number = max(order.early) + 1
                    order.early.clear()
            self._jobs = {
                name: job
                for name, job in self._jobs.items()
                if (job.fetched_at or now) > now - KEPT_S and (job.done_at or now) > now - UNFETCHED_S
            }
        for number, job in lost:
            if job.future.set_running_or_notify_cancel():
                job.finish(error=ConfigError(f"the request with seq_id {number} of this model never came."))

    def run_now(self, work: Callable[[], Any]) -> Any:
        """Run work in the thread that computes; returns what it returns, raises what it raises."""
        job = Job("", work)
        with self._changed:
            self._refuse_closed()
            self._ready.append(job)
            self._changed.notify_all()
        return job.future.result()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for job in (*self._ready, *self._samples):
                job.future.cancel()
            self._changed.notify_all()
        self._thread.join()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ConfigError("the service ends.")

    def _run(self) -> None:
        for turn in itertools.count():
            with self._changed:
                while not (self._ready or self._samples or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                takes_samples = bool(self._samples) and (turn % 2 == 1 or not self._ready)
                while takes_samples and self._is_growing():
                    pass
                batch = self._take_samples() if takes_samples else [self._ready.popleft()]
            batch = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if batch and takes_samples:
                self._compute_samples(batch)
            for job in () if takes_samples else batch:
                job.run()

    def _is_growing(self) -> bool:
        """Whether sample requests come one after another, as clients send the prompts of a step."""
        count = len(self._samples)
        self._changed.wait(GATHER_S)
        return count < len(self._samples) and not self._is_closed

    def _take_samples(self) -> list[Job]:
        kind, batch, count = self._samples[0].kind, list[Job](), 0
        for job in self._samples:
            if job.kind == kind and (not batch or (self._joins and count + job.num_samples <= MAX_SAMPLES)):
                batch.append(job)
                count += job.num_samples
        self._samples = [job for job in self._samples if job not in batch]
        return batch

    def _compute_samples(self, batch: list[Job]) -> None:
        try:
            results = self._sample(batch[0].kind, [job.request for job in batch])
        except BaseException as error:  # noqa: BLE001 - told to the client
            if len(batch) == 1:
                batch[0].finish(error=error)
                return
            for job in batch:  # one of them may be at fault
                self._compute_samples([job])
            return
        for job, result in zip(batch, results, strict=True):
            job.finish(result)
