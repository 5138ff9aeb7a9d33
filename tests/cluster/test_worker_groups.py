"""Roles in several other processes, over each transport: divided, joined, failing by name, leaving nothing."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster.processes_of import temporary_directories, wait_until_gone
from cluster.ray_here import all_gone
from cluster.test_local_worker_group import rows
from cluster.toy_roles import ToyHost
from refusals import refusal

from verl.cluster import rpc
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import RemoteWorkerGroup, role_handles
from verl.component import BuildContext
from verl.errors import ConfigError, VerlError, WorkerDied, WorkerError, WorkerHung


@dataclass
class Groups:
    """Starts groups of one transport; what a test has started is closed with it, and all of it is gone then."""

    name: str
    make: Callable[..., RemoteWorkerGroup]
    is_gone: Callable[[list[int]], bool]

    def __post_init__(self):
        self.started: list[RemoteWorkerGroup] = []

    def start(self, size: int, timeout_s: float = 60.0, run_dir: Path | None = None, **options: Any):
        host = ToyHost(**options)
        cluster = self.make(host, BuildContext(run_dir=run_dir), size, timeout_s)
        self.started.append(cluster)
        return cluster, role_handles(cluster, host)["toy"]


def local(host: ToyHost, context: BuildContext, size: int, timeout_s: float) -> RemoteWorkerGroup:
    return LocalWorkerGroup(host, context, size, num_threads=1, call_timeout_s=timeout_s)


def in_ray(host: ToyHost, context: BuildContext, size: int, timeout_s: float) -> RemoteWorkerGroup:
    from verl.cluster.ray.ray_init import RaySession, RaySettings
    from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup

    session = RaySession(RaySettings(None, 4, 0, 80, 60.0))
    return RayWorkerGroup(session, RayRoleGroup("main", size, 0.5, 0, 1, "PACK", timeout_s), host, context)


LOCAL = pytest.param("local", marks=pytest.mark.xdist_group("cluster"))
RAY = [pytest.mark.xdist_group("ray")]


@pytest.fixture(params=[LOCAL, pytest.param("ray", marks=[*RAY, pytest.mark.exhaustive])])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    if request.param == "ray":
        request.getfixturevalue("ray_here")
        given = Groups("ray", in_ray, lambda pids: bool(all_gone(pids)))
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="t_") as directory:  # short, for a socket's path is limited
            monkeypatch.setattr(tempfile, "tempdir", directory)
            given = Groups("local", local, lambda pids: wait_until_gone(pids) == [])
            yield given
            for cluster in given.started:
                cluster.close()
            assert temporary_directories(Path(directory)) == []
    for cluster in given.started:
        cluster.close()
        assert given.is_gone(list(cluster.pids))


def test_calls_are_divided_joined_and_ended_with_nothing_left(groups, tmp_path):
    cluster, toy = groups.start(2, run_dir=tmp_path)
    answers = [toy.double(rows(count)) for count in (7, 1, 0)]  # more rows than processes, fewer, none
    seven, one, none = (answer.result(timeout=120) for answer in answers)
    assert seven["doubled"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert seven["text"].tolist() == [f"row {row}" for row in range(7)]
    assert sorted(seven["by_rank"].tolist().count(rank) for rank in range(2)) == [3, 4]
    assert one["doubled"].tolist() == [0]
    assert len(none) == 0
    assert toy.count(rows(7)).result(timeout=120) == {"rows": seven["by_rank"].tolist().count(0), "rank": 0}
    assert toy.where().result(timeout=120) == {"pid": cluster.pids[0], "rank": 0, "threads": 1}
    with pytest.raises(AttributeError, match="no_such_method"):
        toy.no_such_method()
    with pytest.raises(AttributeError, match=r"Toy\.unspoken cannot be called from the driver"):
        toy.unspoken()
    endless = toy.sleep(600)
    cluster.close()
    with pytest.raises(VerlError, match=r"close\(\) was called"):
        endless.result(timeout=0)  # whoever waits is set free
    assert groups.is_gone(list(cluster.pids))
    cluster.close()
    with pytest.raises(VerlError, match=r"close\(\) was called"):
        toy.where().result(timeout=0)
    assert (tmp_path / "workers" / "rank_1.log").is_file()
    if groups.name == "ray":
        assert ray.is_initialized()  # somebody else uses it


def test_an_exception_in_one_worker_fails_the_call_by_name_and_ends_all(groups):
    cluster, toy = groups.start(2)
    cluster.step = 17
    failing, waiting = toy.fail_on(1), toy.where()
    with pytest.raises(WorkerError) as caught:
        failing.result(timeout=120)
    error = caught.value
    assert not isinstance(error, WorkerDied)
    assert (error.rank, error.call, error.step) == (1, "toy.fail_on", 17)
    assert "rank 1 failed in toy.fail_on at step 17" in str(error)
    assert "ZeroDivisionError: asked to fail on rank 1" in str(error)
    assert "toy_roles.py" in str(error)  # the worker's own traceback
    for later in (waiting, toy.where()):  # calls behind it fail too, and so do later ones
        with pytest.raises(WorkerError):
            later.result(timeout=120)
    assert groups.is_gone(list(cluster.pids))


def test_a_worker_that_dies_in_a_call_is_named_and_not_the_sibling_that_noticed(groups, monkeypatch):
    monkeypatch.setattr(rpc, "GRACE_S", 10.0)  # a machine under load takes its time to end a process
    cluster, toy = groups.start(2)
    cluster.step = 3
    with pytest.raises(WorkerDied) as caught:
        toy.die_on(1).result(timeout=120)
    error = caught.value
    assert (error.rank, error.call, error.step) == (1, "toy.die_on", 3)
    assert "SIGKILL" in str(error) or (groups.name == "ray" and "the process ended" in str(error))
    assert groups.is_gone(list(cluster.pids))


def test_a_call_may_take_as_long_as_it_needs_while_a_worker_makes_progress(groups):
    limit_s = {"local": 0.5, "ray": 1.0}[groups.name]
    cluster, toy = groups.start(2, timeout_s=limit_s)
    toy.work(4 * limit_s).result(timeout=60)
    with pytest.raises(
        WorkerHung, match=rf"no answer within {limit_s:g} s, and no progress[\s\S]*toy_roles\.py[\s\S]*in sleep"
    ):
        toy.sleep(600).result(timeout=60)
    assert groups.is_gone(list(cluster.pids))


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_ended(groups, monkeypatch):
    monkeypatch.setattr(rpc, "STACK_TIMEOUT_S", 1.0)
    if groups.name == "ray":
        monkeypatch.setattr("verl.cluster.ray.ray_worker_group.STACK_TIMEOUT_S", 1.0)
    cluster, toy = groups.start(2, timeout_s=1.0)
    os.kill(cluster.pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerHung, match="does not react at all: it is stopped") as caught:
        toy.where().result(timeout=60)
    assert (caught.value.rank, caught.value.call) == (1, "toy.where")
    assert groups.is_gone(list(cluster.pids))


@pytest.mark.exhaustive
def test_a_worker_that_is_stopped_is_named_and_not_the_sibling_that_failed_for_it(groups):
    cluster, toy = groups.start(2)
    with refusal("toy.wait_for", 1, kind=WorkerHung) as caught:
        toy.wait_for(1, 0.2).result(timeout=60)
    assert "the process does nothing: it is stopped (SIGSTOP or SIGTSTP). Rank 0 failed for it" in str(caught.value)
    assert "a sibling took too long" in str(caught.value)
    assert groups.is_gone(list(cluster.pids))


def test_a_worker_that_hangs_is_named_and_not_the_sibling_that_waited_for_it_in_an_exchange(groups):
    last = {"local": 2, "ray": 1}[groups.name]
    _, toy = groups.start(last + 1)
    with refusal("toy.exchange_without", last, kind=WorkerHung) as caught:
        toy.exchange_without(last, 2.0).result(timeout=60)
    assert "failed in a collective operation" in str(caught.value)
    assert "in exchange_without" in str(caught.value).partition(f"rank {last} is at")[2]


def test_a_worker_that_stands_still_while_it_builds_its_roles_is_named(groups, monkeypatch):
    monkeypatch.setattr(rpc, "BUILD_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerHung, match="no answer within 1 s") as caught:
        groups.start(2, timeout_s=1.0, hangs_on=1)
    assert caught.value.call == "start"


def test_roles_that_cannot_be_built_are_an_error_with_the_workers_traceback(groups):
    with pytest.raises(WorkerError) as caught:
        groups.start(2, fails_on=1)
    assert "rank 1 failed in start" in str(caught.value)
    assert "FileNotFoundError: weights are not where they should be" in str(caught.value)


@pytest.mark.slow
def test_faults_of_the_configuration_that_a_worker_finds_are_raised_as_they_are(groups):
    with pytest.raises(ConfigError) as caught:
        groups.start(2, fails_on=1, faulty=True)
    assert caught.value.faults == ["toy.size is 3: set it to 4.", "toy.kind is 'x': set it to 'y'."]
