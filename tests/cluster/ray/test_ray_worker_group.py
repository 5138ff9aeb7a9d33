"""Roles in Ray actors: divided, joined, failing by name, and never leaving anything behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
from cluster.ray_here import all_gone, ray_here  # noqa: F401 - a fixture
from cluster.test_local_worker_group import rows
from cluster.toy_roles import ToyHost

import verl
from verl.cluster import rpc
from verl.cluster.ray import ray_worker_group
from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import ConfigError, VerlError, WorkerDied, WorkerError, WorkerHung

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_here")]


def start(size: int, run_dir: Path | None = None, timeout_s: float = 60.0, num_cpus: float = 0.5, **options):
    host = ToyHost(**options)
    group = RayRoleGroup("main", size, num_cpus, 0, 1, "PACK", timeout_s)
    cluster = RayWorkerGroup(RaySession(RaySettings(None, 4, 0, 80, 3.0)), group, host, BuildContext(run_dir=run_dir))
    return cluster, role_handles(cluster, host)["toy"]


def test_a_call_may_take_as_long_as_it_needs_while_a_worker_makes_progress():
    cluster, toy = start(2, timeout_s=1.0)
    try:
        toy.work(4.0).result(timeout=60)
    finally:
        cluster.close()


def test_a_worker_that_is_stopped_is_named_and_not_the_sibling_that_failed_for_it(monkeypatch):
    monkeypatch.setattr(ray_worker_group, "STACK_TIMEOUT_S", 2.0)
    cluster, toy = start(2)
    try:
        with pytest.raises(WorkerHung, match=r"rank 1 failed in toy\.wait_for") as caught:
            toy.wait_for(1, 0.2).result(timeout=60)
        assert "the process does nothing: it is stopped (SIGSTOP or SIGTSTP). Rank 0 failed for it" in str(caught.value)
        assert all_gone(cluster.pids)
    finally:
        cluster.close()


def test_a_worker_that_hangs_is_named_and_not_the_sibling_that_waited_for_it_in_an_exchange():
    cluster, toy = start(2)
    try:
        with pytest.raises(WorkerHung, match=r"rank 1 failed in toy\.exchange_without") as caught:
            toy.exchange_without(1, 2.0).result(timeout=60)
        assert "it did not come to an exchange in which rank 0 waited for it, and stands at" in str(caught.value)
        assert "in exchange_without" in str(caught.value)
    finally:
        cluster.close()


def test_an_exit_of_a_role_is_its_error_and_names_the_line():
    cluster, toy = start(2)
    try:
        with pytest.raises(WorkerError, match=r"rank 1 failed in toy\.exit_on[\s\S]*SystemExit: 0") as caught:
            toy.exit_on(1).result(timeout=30)
        assert not isinstance(caught.value, WorkerDied)
        assert "toy_roles.py" in str(caught.value)
    finally:
        cluster.close()


def test_calls_are_divided_joined_and_ended_with_nothing_left(tmp_path):
    cluster, toy = start(2, tmp_path)
    try:
        answers = [toy.double(rows(count)) for count in (7, 1, 0)]  # more rows than processes, fewer, none
        seven, one, none = (answer.result(timeout=30) for answer in answers)
        assert seven["doubled"].tolist() == [0, 2, 4, 6, 8, 10, 12]
        assert seven["text"].tolist() == [f"row {row}" for row in range(7)]
        assert sorted(seven["by_rank"].tolist().count(rank) for rank in range(2)) == [3, 4]
        assert one["doubled"].tolist() == [0]
        assert len(none) == 0
        where = toy.where().result(timeout=30)
        assert where == {"pid": cluster.pids[0], "rank": 0, "threads": 1}
        with pytest.raises(AttributeError, match=r"Toy\.unspoken cannot be called from the driver"):
            toy.unspoken()
        endless = toy.sleep(600)
    finally:
        cluster.close()
    with pytest.raises(VerlError, match=r"close\(\) was called"):
        endless.result(timeout=0)  # whoever waits is set free
    assert all_gone(cluster.pids)
    cluster.close()
    with pytest.raises(VerlError, match=r"close\(\) was called"):
        toy.where().result(timeout=0)
    assert (tmp_path / "workers" / "rank_1.log").is_file()
    assert ray.is_initialized()  # somebody else uses it


def test_an_exception_in_one_worker_fails_the_call_by_name_and_ends_all():
    cluster, toy = start(2)
    try:
        cluster.step = 17
        failing, waiting = toy.fail_on(1), toy.where()
        with pytest.raises(WorkerError) as caught:
            failing.result(timeout=30)
        error = caught.value
        assert not isinstance(error, WorkerDied)
        assert (error.rank, error.call, error.step) == (1, "toy.fail_on", 17)
        assert "ZeroDivisionError: asked to fail on rank 1" in str(error)
        assert "toy_roles.py" in str(error)  # the worker's own traceback
        for later in (waiting, toy.where()):
            with pytest.raises(WorkerError):
                later.result(timeout=30)
        assert all_gone(cluster.pids)
    finally:
        cluster.close()


def test_a_worker_that_dies_in_a_call_is_named_and_not_the_sibling_that_noticed(monkeypatch):
    monkeypatch.setattr(rpc, "GRACE_S", 10.0)  # a machine under load takes its time to end a process
    cluster, toy = start(2)
    try:
        cluster.step = 3
        with pytest.raises(WorkerDied) as caught:
            toy.die_on(1).result(timeout=30)
        error = caught.value
        assert (error.rank, error.call, error.step) == (1, "toy.die_on", 3)
        assert "the process ended" in str(error)
        assert all_gone(cluster.pids)
    finally:
        cluster.close()


def test_a_worker_that_stands_still_is_named_with_the_line_where_it_stands():
    cluster, toy = start(1, timeout_s=1.0)
    try:
        with pytest.raises(WorkerHung, match=r"no answer within 1 s[\s\S]*toy_roles\.py[\s\S]*in sleep"):
            toy.sleep(600).result(timeout=60)
        assert all_gone(cluster.pids)
    finally:
        cluster.close()


def test_a_worker_that_stands_still_while_it_builds_its_roles_is_named(monkeypatch):
    monkeypatch.setattr(rpc, "BUILD_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerHung, match="no answer within 1 s") as caught:
        start(1, timeout_s=1.0, hangs_on=0)
    assert caught.value.call == "start"


def test_a_stopped_worker_is_named_and_ended(monkeypatch):
    monkeypatch.setattr(ray_worker_group, "STACK_TIMEOUT_S", 1.0)
    cluster, toy = start(2, timeout_s=1.0)
    try:
        toy.where().result(timeout=30)
        os.kill(cluster.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerHung, match="does not react at all") as caught:
            toy.where().result(timeout=60)
        assert (caught.value.rank, caught.value.call) == (1, "toy.where")
        assert all_gone(cluster.pids)
    finally:
        cluster.close()


def test_roles_that_cannot_be_built_are_an_error_with_the_workers_traceback():
    with pytest.raises(WorkerError) as caught:
        start(1, fails_on=0)
    assert "rank 0 failed in start" in str(caught.value)
    assert "FileNotFoundError: weights are not where they should be" in str(caught.value)


def test_workers_for_which_there_is_no_room_are_refused_with_what_there_is():
    with pytest.raises(VerlError, match=r"no room for 2 workers of 400 CPU .*trainer\.placement\.num_cpus"):
        start(2, num_cpus=400.0)


def test_a_driver_of_another_version_than_its_workers_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.0.1")  # as if it had been replaced on the disk since
    with pytest.raises(ConfigError, match=r"address: rank 0 has verl \S+, the driver has 0\.0\.1\. Install the same"):
        start(1)


def test_the_signal_by_which_a_scheduler_ends_a_run_stays_the_runs_own():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # Ray, which is up, takes it for itself


def test_an_address_where_no_cluster_answers_is_named(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # as in a process that has no Ray yet
    with pytest.raises(ConfigError, match=r"trainer\.placement\.address is '127\.0\.0\.1:1': no Ray cluster answers"):
        RaySession(RaySettings("127.0.0.1:1", 1, 0, None, 5.0))
