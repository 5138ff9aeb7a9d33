"""A child that works is told from one that is stopped, by a counter in memory that nobody has to remove."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import verl
from verl.utils import progress as module
from verl.utils.progress import Progress, ProgressWatch, is_stopped

ROOT = Path(verl.__file__).parents[1]
CHILD = """
import sys, time
from verl.utils.progress import Progress
progress = Progress.open(sys.argv[1] if "/" in sys.argv[1] else int(sys.argv[1]))
progress.advance("counting sheep", slot=2)
while True:
    time.sleep(0.005)
    progress.advance(slot=2)
"""


@pytest.fixture
def shared():
    one = Progress()
    yield one
    one.close()
    one.close()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is moved: a list of one number."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("way", ["inherited", "by path"])
def test_a_stopped_child_makes_no_progress_and_goes_on_when_it_is_continued(way, shared):
    source = str(shared.fd) if way == "inherited" else shared.path
    fds = [shared.fd] if way == "inherited" else []
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, source], pass_fds=fds, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        while shared.count(2) < 3:
            time.sleep(0.005)
        watch = ProgressWatch(shared, 0.3)
        assert not watch.is_overdue
        child.send_signal(signal.SIGSTOP)
        while not watch.is_overdue:
            time.sleep(0.01)
        assert is_stopped(child.pid)
        said = watch.describe(child.pid, "rollout.call_timeout_s")
        assert said == (
            "made no progress for 0.3 s (rollout.call_timeout_s) at: counting sheep; it is stopped (SIGSTOP or SIGTSTP)"
        )
        child.send_signal(signal.SIGCONT)
        before = shared.count(2)
        while shared.count(2) == before:
            time.sleep(0.005)
        assert not watch.is_overdue
    finally:
        child.kill()
        child.wait()


def test_it_is_overdue_after_so_long_without_progress_and_not_after_so_long_with_it(shared, clock):
    watch = ProgressWatch(shared, 5.0)
    for _ in range(100):
        clock[0] += 1.0
        shared.advance()
        assert not watch.is_overdue
    for _ in range(4):
        clock[0] += 1.0
        assert not watch.is_overdue
    clock[0] += 1.0
    assert watch.is_overdue
    watch.restart(timeout_s=2.0)
    assert not watch.is_overdue
    assert watch.timeout_s == 2.0


def test_a_waiter_that_was_stopped_itself_blames_nobody(shared, clock):
    watch = ProgressWatch(shared, 5.0)
    clock[0] += 3600.0
    assert watch.idle_s == 1.0


def test_only_the_slots_that_are_watched_count_and_any_of_them_does(shared, clock):
    watch = ProgressWatch(shared, 1.0, slots=[1, 2])
    shared.advance("elsewhere", slot=0)
    clock[0] += 1.0
    assert watch.is_overdue
    shared.advance("here", slot=2)
    assert not watch.is_overdue
    assert watch.describe() == "made no progress for 1 s at: here"
