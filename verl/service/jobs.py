"""The work of a training service: one thread that computes requests in the order of their arrival, and their results.

    handlers ── submit, submit_sample ──> Jobs ──> one thread ──> Job.future, fetched by the job's id

Sample requests that are there together and sample alike are one batch, which others join until a response of it ends.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, VerlError

FETCHED_S = 120.0  # that a result is kept after it was fetched: its answer may have been lost
UNFETCHED_S = 3600.0  # that a result is kept for which nobody comes
GATHER_S = 0.02  # that a batch waits for a second sample request; later ones join it
MAX_SAMPLES = 512  # of one batch
MAX_ADAPTERS = 8  # of one batch
MAX_WAITING = 4096  # requests of one session; more are refused for a while


class Busy(VerlError, RuntimeError):
    """Too many requests wait."""

    status = 429


@dataclass(frozen=True)
class SampleWork:
    """A sample request.

    Attributes:
        kind: those of one kind may be one batch.
        adapter: directory of the weights to sample from; None for the base model.
        num_samples: its size in a batch.
        request, options, noise: of the samples.
    """

    kind: Hashable
    adapter: Path | None
    num_samples: int
    request: Any
    options: Any
    noise: tuple[object, ...]


Late = Callable[[], Sequence[SampleWork]]  # requests that join a batch now


@dataclass(eq=False)
class Job:
    """A request and its result.

    Attributes:
        owner: session that it belongs to.
        sample: a `SampleWork`; None for other requests.
        content: of the request, a digest or a tuple.
        expires_at: on the clock of `time.monotonic`, when the result is dropped.
    """

    owner: str
    future: Future[Any] = field(default_factory=Future)
    sample: Any = None
    content: object = None
    expires_at: float = math.inf

    def keep(self, seconds: float) -> None:
        """Keep the result for a while; an error without the tensors of the calls that raised it."""
        self.expires_at = time.monotonic() + seconds
        if not self.future.cancelled() and (error := self.future.exception()) is not None:
            traceback.clear_frames(error.__traceback__)


class Jobs:
    """Requests and results of a service.

    Args:
        compute: results of a batch of sample requests, and of those that a function has given meanwhile.
    """

    def __init__(self, compute: Callable[[Sequence[SampleWork], Late], Sequence[Any]]):
        self._compute, self._lock = compute, threading.Lock()
        self._thread = ThreadPoolExecutor(1, "training service")
        self._jobs: dict[str, Job] = {}
        self._samples: list[Job] = []

    def submit(self, job_id: str, owner: str, work: Callable[[], Any] | SampleWork, content: object = None) -> str:
        """Queue work, and return its id. What was queued before is not queued again: clients repeat a request to which
        they got no answer.

        Raises:
            Busy: too many requests wait.
            ConfigError: a request of other content has this id.
        """
        with self._lock:
            if (known := self._jobs.get(job_id)) is not None:
                if known.content != content:
                    raise ConfigError(f"the number of request {job_id} is that of an earlier, different one.")
                return job_id
            if sum(job.owner == owner and not job.future.done() for job in self._jobs.values()) >= MAX_WAITING:
                raise Busy(f"{MAX_WAITING} requests wait: ask again later.")
            if isinstance(work, SampleWork):
                job = Job(owner, sample=work, content=content)
                self._samples.append(job)
                self._thread.submit(self._run_samples, job)
            else:
                job = Job(owner, self._thread.submit(work), content=content)
            self._jobs[job_id] = job
        job.future.add_done_callback(lambda _: job.keep(UNFETCHED_S))
        return job_id

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

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue work of the service itself."""
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _run_samples(self, first: Job) -> None:
        """Compute a sample request as a batch with those that wait; nothing if an earlier batch had it."""
        if self._samples == [first]:
            time.sleep(GATHER_S)  # clients send the prompts of a step one after another
        batch: list[Job] = []
        if first in self._samples:
            self._take(batch, first.sample, MAX_ADAPTERS)
        if batch:
            num_adapters = len({job.sample.adapter for job in batch})
            self._run_batch(batch, lambda: self._take(batch, first.sample, num_adapters))

    def _take(self, batch: list[Job], alike: SampleWork, max_adapters: int) -> list[SampleWork]:
        """Add to a batch what waits and fits in; returns it."""
        with self._lock:
            before, size = len(batch), sum(job.sample.num_samples for job in batch)
            adapters = {alike.adapter, *(job.sample.adapter for job in batch)}
            for job in [job for job in self._samples if job.sample.kind == alike.kind]:
                work, wanted = job.sample, adapters | {job.sample.adapter}
                if work is alike or (size + work.num_samples <= MAX_SAMPLES and len(wanted) <= max_adapters):
                    self._samples.remove(job)
                    if job.future.set_running_or_notify_cancel():
                        batch.append(job)
                        size, adapters = size + work.num_samples, wanted
        return [job.sample for job in batch[before:]]

    def _run_batch(self, batch: list[Job], late: Late = tuple) -> None:
        try:
            results = self._compute([job.sample for job in batch], late)
        except BaseException as error:  # noqa: BLE001 - told to the client; also a panic of a library in Rust
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for job in [*batch]:  # one of them may be at fault
                self._run_batch([job])
            return
        for job, result in zip(batch, results, strict=True):
            job.future.set_result(result)
