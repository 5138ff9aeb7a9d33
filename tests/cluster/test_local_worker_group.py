from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster.processes_of import is_running, temporary_directories, wait_until_gone, workers_of
from cluster.toy_roles import ToyHost

from verl.cluster import rpc
from verl.cluster.local_worker_group import InlineWorkerGroup, LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import VerlError, WorkerDied, WorkerError, WorkerHung
from verl.protocol import DataProto

pytestmark = pytest.mark.xdist_group("cluster")
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that nobody else uses; short, for a socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="t_") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def rows(count: int) -> DataProto:
    """Rows of different length, so that the order of the parts is not the order of the rows."""
    mask = torch.arange(count) <= torch.arange(count)[:, None] * 7 % max(count, 1)
    texts = [f"row {row}" for row in range(count)]
    return DataProto.from_dict({"attention_mask": mask.long(), "number": torch.arange(count)}, {"text": texts})


def start(size: int, run_dir: Path | None = None, timeout_s: float = 1800.0, **options):
    host = ToyHost(**options)
    cluster = LocalWorkerGroup(host, BuildContext(run_dir=run_dir), size, num_threads=1, call_timeout_s=timeout_s)
    return cluster, role_handles(cluster, host)["toy"]


def test_calls_are_divided_joined_and_ended_with_nothing_left(own_tmp, tmp_path):
    cluster, toy = start(2, tmp_path)
    try:
        workers = workers_of(os.getpid())
        assert len(workers) == 2

        answers = [toy.double(rows(count)) for count in (7, 1, 0)]  # more rows than processes, fewer, none
        seven, one, none = (answer.result() for answer in answers)
        assert seven["doubled"].tolist() == [0, 2, 4, 6, 8, 10, 12]
        assert seven["text"].tolist() == [f"row {row}" for row in range(7)]
        assert sorted(seven["by_rank"].tolist().count(rank) for rank in range(2)) == [3, 4]
        assert one["doubled"].tolist() == [0]
        assert len(none) == 0

        assert toy.count(rows(7)).result() == {"rows": len([r for r in seven["by_rank"] if r == 0]), "rank": 0}
        where = toy.where().result()
        assert where["pid"] in workers
        assert (where["rank"], where["threads"]) == (0, 1)
        _unknown_methods_fail_at_the_driver(toy)
        endless = toy.sleep(600)
    finally:
        cluster.close()
    with pytest.raises(VerlError, match=r"close\(\) was called"):
        endless.result(timeout=0)  # whoever waits is set free
    assert wait_until_gone(workers) == []
    assert temporary_directories(own_tmp) == []
    cluster.close()
    with pytest.raises(VerlError, match=r"close\(\) was called"):
        toy.where().result()
    assert (tmp_path / "workers" / "rank_1.log").is_file()


def _unknown_methods_fail_at_the_driver(toy):
    with pytest.raises(AttributeError, match="no_such_method"):
        toy.no_such_method()
    with pytest.raises(AttributeError, match=r"Toy\.unspoken cannot be called from the driver"):
        toy.unspoken()


def test_an_exception_in_one_worker_fails_the_call_by_name_and_ends_all(own_tmp):
    cluster, toy = start(2)
    workers = workers_of(os.getpid())
    try:
        cluster.step = 17
        failing, waiting = toy.fail_on(1), toy.where()
        with pytest.raises(WorkerError) as caught:
            failing.result(timeout=30)
        error = caught.value
        assert not isinstance(error, WorkerDied)
        assert (error.rank, error.call, error.step) == (1, "toy.fail_on", 17)
        assert "rank 1 failed in toy.fail_on at step 17" in str(error)
        assert "ZeroDivisionError: asked to fail on rank 1" in str(error)
        assert "toy_roles.py" in str(error)  # the worker's own traceback
        with pytest.raises(WorkerError):
            waiting.result(timeout=30)  # calls behind it fail too, and so do later ones
        with pytest.raises(WorkerError):
            toy.where().result(timeout=30)
        assert wait_until_gone(workers) == []
    finally:
        cluster.close()
    assert temporary_directories(own_tmp) == []


def test_an_exit_of_a_role_is_its_error_and_names_the_line(own_tmp):
    cluster, toy = start(2)
    try:
        with pytest.raises(WorkerError, match=r"rank 1 failed in toy\.exit_on") as caught:
            toy.exit_on(1).result(timeout=30)
        assert not isinstance(caught.value, WorkerDied)
        assert "toy_roles.py" in str(caught.value)
        assert "sys.exit(0)\nSystemExit: 0" in str(caught.value)
    finally:
        cluster.close()


def test_a_worker_that_dies_in_a_call_is_named_and_not_the_sibling_that_noticed(own_tmp, monkeypatch):
    monkeypatch.setattr(rpc, "GRACE_S", 10.0)  # a machine under load takes its time to end a process
    cluster, toy = start(2)
    workers = workers_of(os.getpid())
    try:
        cluster.step = 3
        with pytest.raises(WorkerDied) as caught:
            toy.die_on(1).result(timeout=30)
        error = caught.value
        assert (error.rank, error.call, error.step) == (1, "toy.die_on", 3)
        assert "SIGKILL" in str(error)
        assert wait_until_gone(workers) == []
    finally:
        cluster.close()
    assert temporary_directories(own_tmp) == []


def test_a_worker_killed_while_idle_fails_the_next_call(own_tmp):
    cluster, toy = start(1)
    pid = toy.where().result()["pid"]
    os.kill(pid, signal.SIGUSR1)
    assert wait_until_gone([pid]) == []
    try:
        with pytest.raises(WorkerDied, match="SIGUSR1") as caught:
            toy.where().result(timeout=30)
        assert caught.value.rank == 0
        assert caught.value.call in ("idle", "toy.where")
    finally:
        cluster.close()
    assert temporary_directories(own_tmp) == []


def test_a_call_may_take_as_long_as_it_needs_while_a_worker_makes_progress():
    cluster, toy = start(2, timeout_s=0.5)
    try:
        toy.work(2.0).result(timeout=60)
        with pytest.raises(WorkerHung, match=r"no answer within 0\.5 s, and no progress meanwhile"):
            toy.sleep(600).result(timeout=60)
    finally:
        cluster.close()


def test_a_worker_that_is_stopped_is_named_and_not_the_sibling_that_failed_for_it(own_tmp):
    cluster, toy = start(2)
    workers = workers_of(os.getpid())
    try:
        with pytest.raises(WorkerHung, match=r"rank 1 failed in toy\.wait_for") as caught:
            toy.wait_for(1, 0.2).result(timeout=60)
        assert "the process does nothing: it is stopped (SIGSTOP or SIGTSTP). Rank 0 failed for it" in str(caught.value)
        assert "a sibling took too long" in str(caught.value)
        assert wait_until_gone(workers) == []
    finally:
        cluster.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_that_hangs_is_named_and_not_the_sibling_that_waited_for_it_in_an_exchange(size):
    cluster, toy = start(size)
    try:
        with pytest.raises(WorkerHung, match=r"rank 1 failed in toy\.exchange_without") as caught:
            toy.exchange_without(1, 2.0).result(timeout=60)
        assert "it did not come to an exchange in which rank" in str(caught.value)
        assert "in exchange_without" in str(caught.value)
        assert "waited for it, and stands at" in str(caught.value)
    finally:
        cluster.close()


def test_workers_that_are_stopped_end_with_a_driver_that_is_killed_and_leave_nothing(tmp_path, own_tmp):
    script = tmp_path / "script.py"
    script.write_text(driver(2) + "import time\ntime.sleep(600)\n")
    environment = os.environ | {"TMPDIR": str(own_tmp)}
    process = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "0\n"
        workers = workers_of(process.pid)
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
    process.stdout.close()
    assert wait_until_gone(workers) == []
    assert os.listdir(own_tmp) == []


def test_a_worker_that_stands_still_while_it_builds_its_roles_is_named(own_tmp, monkeypatch):
    monkeypatch.setattr(rpc, "BUILD_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerHung, match="no answer within 1 s") as caught:
        start(2, timeout_s=1.0, hangs_on=1)
    assert caught.value.call == "start"
    assert workers_of(os.getpid()) == []
    assert temporary_directories(own_tmp) == []


def test_roles_that_cannot_be_built_are_an_error_with_the_workers_traceback(own_tmp):
    with pytest.raises(WorkerError) as caught:
        start(2, fails_on=1)
    assert "rank 1 failed in start" in str(caught.value)
    assert "FileNotFoundError: weights are not where they should be" in str(caught.value)
    assert workers_of(os.getpid()) == []
    assert temporary_directories(own_tmp) == []


def test_a_call_in_this_process_fails_where_its_result_is_asked_for():
    host = ToyHost()
    cluster = InlineWorkerGroup(host, BuildContext())
    toy = role_handles(cluster, host)["toy"]
    assert toy.double(rows(3)).result()["doubled"].tolist() == [0, 2, 4]
    future = toy.fail_on(0)
    with pytest.raises(ZeroDivisionError):
        future.result()
    _unknown_methods_fail_at_the_driver(toy)
    cluster.close()
    cluster.close()


DRIVER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from cluster.toy_roles import ToyHost
from verl.cluster.rpc import role_handles
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.component import BuildContext

host = ToyHost()
cluster = LocalWorkerGroup(host, BuildContext(), {size}, num_threads=1)
toy = role_handles(cluster, host)["toy"]
print(toy.where().result()["rank"], flush=True)
"""


def driver(size: int) -> str:
    return DRIVER.format(root=str(TESTS.parent), tests=str(TESTS), size=size)


def test_a_script_without_a_main_guard_works_and_its_death_ends_the_workers(tmp_path, own_tmp):
    script = tmp_path / "script.py"
    sign = tmp_path / "asleep"
    script.write_text(driver(1) + f"toy.sleep(600, {str(sign)!r}).result()\n")
    env = os.environ | {"TMPDIR": str(own_tmp)}
    process = subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "0\n"
        workers = workers_of(process.pid)
        assert len(workers) == 1
        while not sign.exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert wait_until_gone(workers) == []  # in the midst of a call
    assert temporary_directories(own_tmp) == []


def test_code_fed_on_standard_input_works_and_ends_its_workers_without_close(own_tmp):
    env = os.environ | {"TMPDIR": str(own_tmp)}
    code = driver(1) + "print(toy.where().result()['pid'])\n"
    done = subprocess.run([sys.executable, "-"], input=code, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not is_running(int(done.stdout.split()[-1]))
    assert temporary_directories(own_tmp) == []
