"""A pool of processes: lending, replacing those that ended, starts that fail, and its end."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time

import pytest

from verl.utils.child_process.pool import PoolClosed, ProcessPool


class Sleeper:
    """A process that sleeps."""

    def __init__(self, seconds_to_ready: float = 0.0):
        self.process = subprocess.Popen(["sleep", "600"])
        self.seconds_to_ready = seconds_to_ready

    @property
    def is_usable(self) -> bool:
        return self.process.poll() is None

    def await_ready(self) -> None:
        end = time.monotonic() + self.seconds_to_ready
        while time.monotonic() < end:
            if not self.is_usable:
                raise OSError("it was killed")
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pools():
    made: list[ProcessPool] = []

    def make(start=Sleeper, size=2, **options):
        made.append(ProcessPool(start, size, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_each_process_is_lent_once_at_a_time_and_whoever_comes_waits(pools):
    pool = pools(size=2)
    with pool.lend() as first, pool.lend() as second:
        assert first is not second
        with pytest.raises(TimeoutError):
            pool.take(timeout_s=0.05)
    with pool.lend() as again:
        assert again in (first, second)


def test_a_process_that_has_ended_is_replaced_whether_it_was_lent_or_free(pools):
    pool = pools(size=1)
    with pool.lend() as first:
        first.kill()
    with pool.lend() as second:
        assert second.is_usable
    second.kill()
    with pool.lend() as third:
        assert third.is_usable
    assert list(pool.loans) == [third]


def test_what_is_used_once_is_killed_and_others_are_started_ahead(pools):
    pool = pools(size=1, is_used_once=True)
    with pool.lend() as first, pool.lend() as second:
        assert first is not second
    assert not first.is_usable
    assert not second.is_usable


def test_where_a_process_serves_several_the_one_with_the_fewest_is_lent_and_ends_with_its_last(pools):
    pool = pools(size=2, max_loans=None)
    taken = [pool.take() for _ in range(2)]
    while len(pool.loans) < 2:
        time.sleep(0.01)
    taken += [pool.take() for _ in range(2)]
    assert sorted(pool.loans.values()) == [2, 2]
    ended = taken[0]
    ended.kill()
    assert pool.take() is not ended
    while ended in taken:
        assert ended in pool.loans
        taken.remove(ended)
        pool.give_back(ended)
    assert ended not in pool.loans


def test_a_start_that_fails_is_told_to_whoever_waits_and_tried_again_for_the_next(pools):
    faults = [OSError("no memory")] * 3  # the first one may come before anybody waits

    def start():
        if faults:
            raise faults.pop()
        return Sleeper()

    pool = pools(start, size=1)
    with pytest.raises(OSError, match="no memory"):
        pool.take()
    while faults:
        with contextlib.suppress(OSError):
            pool.give_back(pool.take())
    with pool.lend() as process:
        assert process.is_usable


def test_the_end_of_a_pool_kills_what_is_free_or_being_started_and_wakes_whoever_waits(pools):
    processes = []

    def start():
        processes.append(Sleeper(seconds_to_ready=60.0 if processes else 0.0))
        return processes[-1]

    pool = pools(start, size=2, starters=1)
    pool.take()
    found: list[BaseException] = []

    def wait():
        try:
            pool.take()
        except PoolClosed as error:
            found.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while len(processes) < 2:
        time.sleep(0.01)
    pool.close()
    pool.close()
    waiter.join()
    assert len(found) == 1
    assert not any(process.is_usable for process in processes)
    with pytest.raises(PoolClosed):
        pool.take()
