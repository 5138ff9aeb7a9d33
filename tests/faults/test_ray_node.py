"""A machine that leaves a Ray cluster, and a cluster that was there before: two raylets on this machine play it."""

from __future__ import annotations

import os
import signal

import pytest
import ray
from cluster.ray_here import all_gone, placed
from cluster.toy_roles import ToyHost
from ray.cluster_utils import Cluster
from same_training import course
from trainer.runs import fit

from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import WorkerDied

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.exhaustive, pytest.mark.slow]


def test_a_run_that_started_ray_starts_it_anew_after_a_loss_and_ends_it(model32, tmp_path, monkeypatch):
    submit, pids = RayWorkerGroup.submit, []

    def submit_and_kill(cluster, role, method, args):
        if method == "update" and cluster.step == 2 and not pids:
            pids.extend(cluster.pids)
            os.kill(cluster.pids[0], signal.SIGKILL)
        return submit(cluster, role, method, args)

    monkeypatch.setattr(RayWorkerGroup, "submit", submit_and_kill)
    result = fit(course(model32, tmp_path, placement=placed(max_restarts=1)), tmp_path / "run")
    assert (result.status, len(result.restarts)) == ("finished", 1)
    assert not ray.is_initialized()
    assert all_gone(pids)


def start(address: str) -> tuple[RayWorkerGroup, object]:
    group = RayRoleGroup("main", 2, 1.0, 0, 1, "STRICT_PACK", 120.0)
    cluster = RayWorkerGroup(RaySession(RaySettings(address, 2, 0, None, 60.0)), group, ToyHost(), BuildContext())
    return cluster, role_handles(cluster, ToyHost())["toy"]


def test_a_machine_that_leaves_is_named_and_the_cluster_is_left_as_it_was():
    memory = {"object_store_memory": 80 * 2**20}
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    try:
        machine = machines.add_node(num_cpus=2, **memory)  # type: ignore
        cluster, toy = start(machines.address)  # type: ignore
        toy.where().result(timeout=60)  # type: ignore
        cluster.step = 5
        asleep = toy.sleep(600)  # type: ignore
        machines.remove_node(machine)
        with pytest.raises(WorkerDied, match="its machine left the Ray cluster") as caught:
            asleep.result(timeout=120)
        assert (caught.value.call, caught.value.step) == ("toy.sleep", 5)
        assert all_gone(cluster.pids)
        cluster.close()

        machines.add_node(num_cpus=2, **memory)  # type: ignore
        cluster, toy = start(machines.address)  # type: ignore
        assert toy.where().result(timeout=60)["rank"] == 0  # type: ignore
        cluster.close()
        assert all_gone(cluster.pids)
        assert not ray.is_initialized()
        assert all(node.any_processes_alive() for node in machines.list_all_nodes())
    finally:
        machines.shutdown()
