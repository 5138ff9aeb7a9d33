"""A pool of processes: starts that fail, and its end."""

import contextlib
import subprocess
import threading

import pytest

from verl.utils.child_process.pool import PoolClosed, ProcessPool


class Sleeper:
    def __init__(self, ready: str = "true"):
        self.process, self.ready = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sh", "-c", ready])

    @property
    def is_usable(self) -> bool:
        return self.process.poll() is None

    def await_ready(self) -> None:
        if self.ready.wait() != 0:
            raise OSError("it was not made ready")

    def kill(self) -> None:
        for process in (self.process, self.ready):
            process.kill()
            process.wait()


def test_a_start_that_fails_is_told_to_whoever_waits_and_tried_again_for_the_next():
    ready = ["true", *["false"] * 3]  # the first one may fail before anybody waits
    with contextlib.closing(ProcessPool(lambda: Sleeper(ready.pop()), 1)) as pool:
        with pytest.raises(OSError, match="not made ready"):
            pool.take()
        while ready:
            with contextlib.suppress(OSError):
                pool.take()


def test_the_end_of_a_pool_kills_what_is_free_or_being_started_and_wakes_whoever_waits():
    ready, made, found = ["sleep 600", "true"], [], []
    pool = ProcessPool(lambda: made.append(Sleeper(ready.pop())) or made[-1], 2, starters=1)
    pool.take()

    def wait():
        with pytest.raises(PoolClosed):
            pool.take()
        found.append("closed")

    waiter = threading.Thread(target=wait)
    waiter.start()
    while len(made) < 2:
        pass
    pool.close()
    waiter.join()
    assert found == ["closed"]
    assert not any(process.is_usable for process in made)
