"""What is left of a run in Ray when its driver is interrupted or killed, or ends after a loss: nothing."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from cluster.ray_here import all_gone, kill_in, placed
from same_training import course
from trainer.runs import fit

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.exhaustive, pytest.mark.slow]
TESTS = Path(__file__).resolve().parents[1]

DRIVER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from cluster.ray_here import small_session
from cluster.toy_roles import ToyHost
from verl.cluster.rpc import role_handles
from verl.cluster.ray.ray_worker_group import RayWorkerGroup
from verl.cluster.ray.ray_worker_group import RayRoleGroup
from verl.component import BuildContext

host = ToyHost()
cluster = RayWorkerGroup(small_session(), RayRoleGroup("main", 1, 0.5, 0, 1, "PACK", 60.0), host, BuildContext())
toy = role_handles(cluster, host)["toy"]
import ray
raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
print(cluster.pids[0], raylet, flush=True)
toy.sleep(600, {sign!r}).result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_interrupted_or_killed_leaves_no_worker_and_no_ray(number, tmp_path):
    script, sign = tmp_path / "script.py", tmp_path / "asleep"
    script.write_text(DRIVER.format(root=str(TESTS.parent), tests=str(TESTS), sign=str(sign)))
    driver = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]  # type: ignore
        while not sign.exists():
            assert driver.poll() is None
            time.sleep(0.05)
        driver.send_signal(number)
        driver.wait(timeout=240)
    finally:
        driver.kill()
        driver.wait()
    assert len(pids) == 2
    assert all_gone(pids)


def test_a_run_that_started_ray_starts_it_anew_after_a_loss_and_ends_it(model32, tmp_path, monkeypatch):
    pids = kill_in(monkeypatch, "actor.update", step=2)
    result = fit(course(model32, tmp_path, placement=placed(max_restarts=1)), tmp_path / "run")
    assert (result.status, len(result.restarts)) == ("finished", 1)
    assert not ray.is_initialized()
    assert all_gone(pids)
