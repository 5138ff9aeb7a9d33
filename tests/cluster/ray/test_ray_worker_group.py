"""Roles in Ray actors: divided, joined, failing by name, and never leaving anything behind."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from cluster.toy_roles import ToyHost
from refusals import refusal

import verl
from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_worker import free_address
from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import ConfigError, VerlError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_here")]


def start(size: int, run_dir: Path | None = None, timeout_s: float = 60.0, num_cpus: float = 0.5, **options):
    host = ToyHost(**options)
    group = RayRoleGroup("main", size, num_cpus, 0, 1, "PACK", timeout_s)
    cluster = RayWorkerGroup(RaySession(RaySettings(None, 4, 0, 80, 3.0)), group, host, BuildContext(run_dir=run_dir))
    return cluster, role_handles(cluster, host)["toy"]


@pytest.mark.slow
def test_workers_for_which_there_is_no_room_are_refused_with_what_there_is():
    with pytest.raises(VerlError, match=r"no room for 2 workers of 400 CPU .*trainer\.placement\.num_cpus"):
        start(2, num_cpus=400.0)


@pytest.mark.exhaustive
def test_a_driver_of_another_version_than_its_workers_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.0.1")  # as if it had been replaced on the disk since
    with pytest.raises(ConfigError, match=r"address: rank 0 has verl \S+, the driver has 0\.0\.1\. Install the same"):
        start(1)


def test_the_signal_by_which_a_scheduler_ends_a_run_stays_the_runs_own():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # Ray, which is up, takes it for itself


def test_an_address_where_no_cluster_answers_is_named(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # as in a process that has no Ray yet
    with refusal("trainer.placement.address"):
        RaySession(RaySettings("127.0.0.1:1", 1, 0, None, 5.0))


@pytest.mark.exhaustive
def test_an_address_where_something_else_listens_is_named_when_its_time_is_over():
    join = "from verl.cluster.ray.ray_init import *; RaySession(RaySettings(sys.argv[1], 0, 0, None, 3.0))"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = [sys.executable, "-c", f"import sys; {join}", f"127.0.0.1:{silent.getsockname()[1]}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=35, check=False)  # Ray gives up after 40 s
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("verl.errors.ConfigError: trainer.placement.address is '127.0.0.1:"), done.stderr
    assert "start_timeout_s=3 s" in last


def test_the_port_of_a_rendezvous_is_nobody_elses_until_the_group_meets_there():
    port = int(free_address("127.0.0.1").rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    met = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore
    assert met.port == port
