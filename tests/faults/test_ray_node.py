"""A machine that leaves a Ray cluster, and a cluster that was there before: two raylets on this machine play it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
import ray
from cluster.ray_here import all_gone, placed
from cluster.toy_roles import ToyHost
from ray.cluster_utils import Cluster
from same_training import course
from trainer.runs import fit

from verl.cluster.ray.ray_init import RaySession, RaySettings
from verl.cluster.ray.ray_placement import RayPlacement
from verl.cluster.ray.ray_worker_group import RayRoleGroup, RayWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import WorkerDied
from verl.utils.orphan_cleanup import kill_marked

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
        machine = machines.add_node(num_cpus=2, **memory)
        cluster, toy = start(machines.address)
        toy.where().result(timeout=60)
        cluster.step = 5
        asleep = toy.sleep(600)
        machines.remove_node(machine)
        with pytest.raises(WorkerDied, match="its machine left the Ray cluster") as caught:
            asleep.result(timeout=120)
        assert (caught.value.call, caught.value.step) == ("toy.sleep", 5)
        assert all_gone(cluster.pids)
        cluster.close()

        machines.add_node(num_cpus=2, **memory)
        cluster, toy = start(machines.address)
        assert toy.where().result(timeout=60)["rank"] == 0
        cluster.close()
        assert all_gone(cluster.pids)
        assert not ray.is_initialized()
        assert all(node.any_processes_alive() for node in machines.list_all_nodes())
    finally:
        machines.shutdown()


def test_a_cluster_that_asks_for_the_token_of_an_earlier_local_run_is_joined(tmp_path):
    """`ray start` asks for a token once one lies there, as it does after any local run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home, mark = tmp_path / "home", f"VERL_TEST_CLUSTER={port}"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text("0123456789abcdef0123456789abcdef")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "VERL_TEST_CLUSTER": str(port), "RAY_USAGE_STATS_ENABLED": "0"}
    place = tempfile.mkdtemp(prefix="r", dir="/tmp")  # a short one, for its sockets
    begin = ["start", "--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={place}"]
    script = "from ray.scripts.scripts import main; main()"
    join = (
        "import sys, ray\nfrom verl.cluster.ray.ray_init import RaySession, RaySettings\n"
        "session = RaySession(RaySettings(sys.argv[1], 1, 0, None, 60.0))\n"
        "print('machines', len(ray.nodes()))\nsession.close()"
    )
    try:
        more = ["--object-store-memory=80000000", "--disable-usage-stats"]
        subprocess.run([sys.executable, "-c", script, *begin, *more], env=environment, check=True, capture_output=True)
        command = [sys.executable, "-c", join, f"127.0.0.1:{port}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert "machines 1" in done.stdout, done.stderr
        other = tmp_path / "other"
        (other / ".ray").mkdir(parents=True)
        for token, said in ((None, "it was shown no token"), ("f" * 32, "the cluster's must be the same")):
            if token is not None:
                (other / ".ray/auth_token").write_text(token)
            done = subprocess.run(command, env=environment | {"HOME": str(other)}, capture_output=True, text=True)
            assert "a Ray cluster could not be joined there" in done.stderr
            assert said in done.stderr
    finally:
        kill_marked(mark)
        shutil.rmtree(place, ignore_errors=True)


def test_a_cluster_with_fewer_machines_gpus_or_room_than_a_run_asks_for_is_refused_with_what_it_has():
    memory = {"object_store_memory": 80 * 2**20}
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
    try:
        machines.add_node(num_cpus=2, num_gpus=1, **memory)

        def lacks(nnodes: int, per_node: int, device: str = "cpu", **options: float) -> list[str]:
            placement = RayPlacement(address=machines.address, **options)
            return [*placement.lacks(("actor",), nnodes, per_node, device)]

        assert lacks(2, 1) == []
        assert lacks(1, 3) == []
        (few,) = lacks(3, 1)
        assert re.match(r"trainer\.nnodes is 3: the Ray cluster at \S+ has 2 machines \(\S+: \d CPU, ", few)
        assert "2 CPU, 1 GPU" in few
        assert few.endswith("or set trainer.nnodes=2.")
        (gpus,) = lacks(2, 1, "cuda")
        assert "of which 1 of 2 have 1 GPU for each of 1 workers" in gpus
        (room,) = lacks(2, 4)
        assert "with room for 3 workers of 1 CPU and 0 GPU, and 8 are asked for" in room
        assert not ray.is_initialized()
    finally:
        machines.shutdown()
