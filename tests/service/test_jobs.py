"""The work of a training service: its order, batches of samples, and what is kept of it."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest

from verl.service import jobs as module
from verl.service.jobs import MAX_SAMPLES, Busy, Jobs, SampleWork


def work(kind: str, name: str, adapter: str | None = None, num_samples: int = 1) -> SampleWork:
    return SampleWork(kind, None if adapter is None else Path(adapter), num_samples, name, None, ())


def result(jobs: Jobs, name: str) -> object:
    job = jobs.job(name)
    assert job is not None
    return job.future.result(30)


def held(jobs: Jobs) -> threading.Event:
    """The thread that computes, held until the event is set."""
    event = threading.Event()
    jobs.run(event.wait)
    return event


def test_a_step_waits_for_samples_that_came_before_it_alone():
    order: list[str] = []

    def compute(works, late):
        order.extend(x.request for x in works)
        jobs.submit(f"after {order[-1]}", "one", work("c", f"after {order[-1]}"))  # a client that never stops
        return [None] * len(works)

    jobs = Jobs(compute)
    event = held(jobs)
    for name in "aab":
        jobs.submit(f"{name}{len(jobs._jobs)}", "one", work(name, name))
    step = jobs.submit("step", "other", lambda: order.append("step"))
    event.set()
    result(jobs, step)
    assert order[:4] == ["a", "a", "b", "step"]
    jobs.close()


def test_requests_join_a_batch_of_their_kind_and_adapters_while_it_is_computed():
    batches: list[list[str]] = []

    def compute(works, late):
        if works[0].kind == "a" and not batches:
            for name, x in later.items():
                jobs.submit(name, "one", x)
            works = [*works, *late(), *late()]
        batches.append([x.request for x in works])
        return [x.request for x in works]

    later = {
        name: work(kind, name, adapter, count)
        for name, kind, adapter, count in (
            ("joins", "a", "x", 1), ("of the other", "a", "y", 1), ("another kind", "b", "x", 1),
            ("another adapter", "a", "z", 1), ("too many", "a", "x", MAX_SAMPLES), ("also", "a", "y", 2),
        )
    }  # fmt: skip
    jobs = Jobs(compute)
    event = held(jobs)
    for name, adapter in (("first", "x"), ("second", "y"), ("cancelled", "x")):
        jobs.submit(name, "one", work("a", name, adapter))
    jobs._jobs["cancelled"].future.cancel()
    event.set()
    for name in ("first", "second", *later):
        assert result(jobs, name) == name
    together = ["first", "second", "joins", "of the other", "also"]
    assert batches == [together, ["another kind"], ["another adapter"], ["too many"]]
    jobs.close()


def test_a_request_at_fault_fails_alone():
    def compute(works, late):
        works = [*works, *late()]
        if any(x.request == "bad" for x in works):
            raise ValueError("at fault")
        return [x.request for x in works]

    jobs = Jobs(compute)
    event = held(jobs)
    for name in ("good", "bad", "other"):
        jobs.submit(name, "one", work("a", name))
    event.set()
    assert (result(jobs, "good"), result(jobs, "other")) == ("good", "other")
    with pytest.raises(ValueError, match="at fault"):
        result(jobs, "bad")
    jobs.close()


def test_a_client_with_too_many_requests_is_refused_until_some_are_done(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    jobs = Jobs(lambda works, late: [None] * len(works))
    event = held(jobs)
    jobs.submit("sample", "one", work("a", "sample"))
    jobs.submit("step", "one", int)
    with pytest.raises(Busy):
        jobs.submit("more", "one", int)
    jobs.submit("of another", "other", int)
    event.set()
    result(jobs, "step")
    assert result(jobs, jobs.submit("more", "one", int)) == 0
    jobs.close()


def test_an_error_that_is_kept_holds_no_tensors():
    class Tensor:
        pass

    def fails():
        large = Tensor()
        kept.append(weakref.ref(large))
        raise MemoryError("out of memory")

    kept: list[weakref.ref] = []
    jobs, name = Jobs(lambda works, late: []), "one"
    jobs.submit(name, "owner", fails)
    with pytest.raises(MemoryError):
        result(jobs, name)
    jobs.run(int).result()
    assert kept[0]() is None
    jobs.close()
