"""The work of a training service: one thread that computes requests in the order of their arrival, and their results.

    handlers ── submit, submit_sample ──> Jobs ──> one thread ──> Job.future, fetched by the job's id

Sample requests that are there together and sample alike are one batch.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from verl.errors import VerlError

FETCHED_S = 120.0  # that a result is kept after it was fetched: its answer may have been lost
UNFETCHED_S = 3600.0  # that a result is kept for which nobody comes
GATHER_S = 0.005  # a batch begins when no further sample request comes for so long
MAX_SAMPLES = 512  # of one batch
MAX_ADAPTERS = 8  # of one batch
MAX_WAITING = 4096  # requests of one session; more are refused for a while


class Busy(VerlError, RuntimeError):
    """Too many requests wait."""

    status = 429


@dataclass(eq=False)
class Job:
    """A request and its result.

    Attributes:
        owner: session that it belongs to.
        kind, adapter, request, num_samples: of a sample request. Those of one kind may be one batch.
        expires_at: on the clock of `time.monotonic`, when the result is dropped.
    """

    owner: str
    future: Future[Any] = field(default_factory=Future)
    kind: Hashable = None
    adapter: Hashable = None
    request: Any = None
    num_samples: int = 0
    expires_at: float = math.inf

    def keep(self, seconds: float) -> None:
        self.expires_at = time.monotonic() + seconds


class Jobs:
    """Requests and results of a service.

    Args:
        sample: results of a batch of sample requests of one kind.
        joins: whether sample requests are joined to batches; else each is computed alone, with the same bits each time.
    """

    def __init__(self, sample: Callable[[Sequence[Any]], Sequence[Any]], joins: bool = True):
        self._sample, self._max_samples, self._lock = sample, MAX_SAMPLES if joins else 0, threading.Lock()
        self._thread = ThreadPoolExecutor(1, "training service")
        self._jobs: dict[str, Job] = {}
        self._samples: list[Job] = []

    def submit(self, job_id: str, owner: str, work: Callable[[], Any]) -> str:
        """Queue work, and return its id. What was queued before is not queued again: clients repeat a request to which
        they got no answer.

        Raises:
            Busy: too many requests wait.
        """
        with self._lock:
            if self._is_new(job_id, owner):
                self._add(job_id, Job(owner, self._thread.submit(work)))
        return job_id

    def submit_sample(self, job_id: str, job: Job) -> str:
        """Queue a sample request; see `submit`."""
        with self._lock:
            if self._is_new(job_id, job.owner):
                self._samples.append(job)
                self._add(job_id, job)
                self._thread.submit(self._run_samples)
        return job_id

    def _is_new(self, job_id: str, owner: str) -> bool:
        if job_id in self._jobs:
            return False
        if sum(job.owner == owner and not job.future.done() for job in self._jobs.values()) >= MAX_WAITING:
            raise Busy(f"{MAX_WAITING} requests wait: ask again later.")
        return True

    def _add(self, job_id: str, job: Job) -> None:
        self._jobs[job_id] = job
        job.future.add_done_callback(lambda _: job.keep(UNFETCHED_S))

    def job(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def forget(self, owner: str) -> None:
        """Drop the jobs of a session and their results; what waits is cancelled."""
        with self._lock:
            for job_id in [name for name, job in self._jobs.items() if job.owner == owner]:
                self._jobs.pop(job_id).future.cancel()

    def sweep(self) -> None:
        """Drop results that were fetched a while ago, or for which nobody comes."""
        with self._lock:
            self._jobs = {name: job for name, job in self._jobs.items() if job.expires_at > time.monotonic()}

    def run_now(self, work: Callable[[], Any]) -> Any:
        """Run work in the thread that computes; returns what it returns, raises what it raises."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _run_samples(self) -> None:
        """Compute the next batch of samples; nothing if an earlier batch had the request for which this was queued."""
        count = 0
        while count < len(self._samples):  # clients send the prompts of a step one after another
            count = len(self._samples)
            time.sleep(GATHER_S)
        with self._lock:
            batch, self._samples = self._taken(self._samples)
        self._compute([job for job in batch if job.future.set_running_or_notify_cancel()])

    def _taken(self, jobs: list[Job]) -> tuple[list[Job], list[Job]]:
        """The next batch, and what is left."""
        batch, adapters, count = jobs[:1], {job.adapter for job in jobs[:1]}, sum(job.num_samples for job in jobs[:1])
        for job in jobs[1:]:
            fits = count + job.num_samples <= self._max_samples and len(adapters | {job.adapter}) <= MAX_ADAPTERS
            if job.kind == batch[0].kind and fits:
                batch.append(job)
                adapters.add(job.adapter)
                count += job.num_samples
        return batch, [job for job in jobs if job not in batch]

    def _compute(self, batch: list[Job]) -> None:
        try:
            results = self._sample([job.request for job in batch]) if batch else ()
        except BaseException as error:  # noqa: BLE001 - told to the client; also a panic of a library in Rust
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for job in batch:  # one of them may be at fault
                self._compute([job])
            return
        for job, result in zip(batch, results, strict=True):
            job.future.set_result(result)
