"""Two hosts, each with its own disk, joined by Ray: train, save, lose one, resume; what works, what is refused."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.courses import first_difference, steps_saved
from faults.two_hosts import DISK, TwoHosts, two_hosts, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("two hosts"),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"two hosts: {WHY_NOT}"),
]
STEPS = 5
LIMIT_S = 400.0
END_S = 60.0  # from the loss of a host to the end of the run
RULE = """
import time


def variety(prompts, responses):
    time.sleep(2)
    return [len(set(response)) for response in responses]
"""


class Cluster:
    """Runs over both hosts, each by its name: `NAME/run` and `NAME/checkpoints` on the disk of the driver's host."""

    def __init__(self, hosts: TwoHosts, model: Path, shared: Path):
        self.hosts, self._model, self._shared = hosts, model, shared
        (shared / "rate.py").write_text(RULE)

    def words(self, name: str, *more: str, num_hosts: int = 2) -> list[str]:
        run = ["ppo", "algorithm=grpo", "actor=pretrained", f"actor.model.path={self._model}", "reward=function"]
        run += [f"reward.path={self._shared}/rate.py:variety", "actor.optimizer.lr=1e-3", "rollout.max_new_tokens=6"]
        run += ["trainer=ray", f"trainer.placement.address={self.hosts.address}", "trainer.placement.max_restarts=0"]
        run += ["trainer.placement.strategy=SPREAD", f"trainer.nnodes={num_hosts}", "trainer.n_gpus_per_node=1"]
        run += ["sharding=ddp", "trainer.prompts_per_step=4", "trainer.group_size=2", f"trainer.total_steps={STEPS}"]
        run += ["data.held_out=4", "trainer.eval_interval=100", "trainer.eval_before=false", "trainer.num_threads=1"]
        run += ["checkpoint.save_interval=1", "trainer.save_final=false"]
        run += [f"hydra.run.dir={DISK}/work/{name}/run", f"checkpoint.save_dir={DISK}/work/{name}/checkpoints"]
        return [sys.executable, "-m", "verl.cli", *run, f"trainer.experiment_name={name}", *more]

    def run(self, name: str, *more: str, num_hosts: int = 2) -> tuple[int, str]:
        words = self.words(name, *more, num_hosts=num_hosts)
        done = self.hosts.driver.run(*words, timeout_s=LIMIT_S)
        return done.returncode, done.stdout

    def start_until_saved(self, name: str, place: str, *more: str) -> subprocess.Popen[str]:
        """A run, once something is in its directory of checkpoints."""
        process = self.hosts.driver.start(*self.words(name, *more))
        there, end = self.hosts.driver.disk / name / "checkpoints" / place, LIMIT_S
        while not there.exists():
            end -= 0.1
            time.sleep(0.1)
            assert end > 0, process.kill() or process.communicate()[0]
            assert process.poll() is None, process.communicate()[0]
        return process

    def workers(self, number: int) -> list[str]:
        """Process ids of the workers on a host, 0 or 1, as that host numbers them."""
        return self.hosts.hosts[number].run("pgrep", "-f", "_RayWorker").stdout.split()

    def wait_until_no_worker_is_left(self, *numbers: int) -> None:
        """Wait until these hosts, 0 and 1, have no worker, at most `END_S`."""
        end = time.monotonic() + END_S
        while left := [self.workers(number) for number in numbers if self.workers(number)]:
            assert time.monotonic() < end, left
            time.sleep(1.0)

    def store(self, name: str) -> list[str]:
        return ["storage=local", f"storage.path={self._shared}/store_{name}"]

    def taken(self, name: str, to: Path) -> Path:
        """A copy of what a run has written on the driver's host."""
        shutil.copytree(self.hosts.driver.disk / name, to / name, symlinks=True)
        return to / name


@pytest.fixture
def cluster(dir32: Path, tmp_path: Path) -> Iterator[Cluster]:
    with two_hosts() as hosts:
        yield Cluster(hosts, dir32, tmp_path)


def test_a_host_that_is_lost_is_named_and_what_resumes_depends_on_where_the_checkpoint_is(cluster, tmp_path):
    hosts = cluster.hosts
    status, said = cluster.run("whole")
    assert status == 0, said
    assert "cannot see /mnt/work/whole/checkpoints as the driver does" in said
    assert "restart on a machine without it is refused" in said
    whole = cluster.taken("whole", tmp_path / "taken")
    assert steps_saved(whole) == [*range(1, STEPS + 1)][-len(steps_saved(whole)) :]
    assert not [*hosts.hosts[1].disk.iterdir()], "only the driver's host has anything"

    process = cluster.start_until_saved("lost", "global_step_2")
    hosts.hosts[1].power_off()  # without a word: its processes and its disk are gone
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said
    assert re.search(r"rank \d failed in [\w.]+ at step \d+.*hostb \(", said, re.DOTALL), said
    hosts.replace(2)

    status, said = cluster.run("lost", "resume=latest")
    assert status == 1, said
    assert "which the run resumes from, is not on the machine hostb: each machine reads the checkpoint" in said
    assert "Traceback" not in said
    assert not [*hosts.hosts[1].disk.iterdir()]

    saved = f"lost/checkpoints/{(hosts.driver.disk / 'lost/checkpoints/latest').readlink()}"
    shutil.copytree(hosts.driver.disk / saved, hosts.hosts[1].disk / saved)  # as the message says
    status, said = cluster.run("lost", "resume=latest")
    assert status == 0, said
    assert first_difference(whole, cluster.taken("lost", tmp_path / "taken")) is None


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("killed", signal.SIGKILL, r"rank \d failed in [\w.]+ at step \d[\s\S]*the process ended .* on hostb"),
        ("stopped", signal.SIGSTOP, r"rank \d failed in [\w.]+ at step \d[\s\S]*does not react at all"),
    ],
)
def test_a_worker_that_is_killed_or_stopped_on_the_other_host_is_named_and_no_worker_is_left(
    name, number, message, cluster
):
    more = ["trainer.placement.call_timeout_s=10", f"trainer.total_steps={10 * STEPS}"]
    process = cluster.start_until_saved(name, "global_step_2", *more)
    (worker,) = cluster.workers(1)
    assert cluster.hosts.hosts[1].run("kill", f"-{int(number)}", worker).returncode == 0
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said
    assert re.search(message, said), said
    cluster.wait_until_no_worker_is_left(0, 1)


def test_with_a_store_hosts_whose_disks_are_lost_go_on_the_driver_s_too(cluster, tmp_path):
    hosts, store = cluster.hosts, cluster.store("stored")
    status, said = cluster.run("whole")
    assert status == 0, said
    whole = cluster.taken("whole", tmp_path / "taken")

    process = cluster.start_until_saved("stored", "uploaded/global_step_2", *store)
    hosts.replace(2)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said
    process = cluster.start_until_saved("stored", "uploaded/global_step_3", *store, "resume=latest")
    hosts.replace(1, 2)
    process.communicate(timeout=LIMIT_S)
    status, said = cluster.run("stored", *store, "resume=latest")
    assert status == 0, said
    assert "restart on a machine without it fetches it from" in said
    assert first_difference(whole, cluster.taken("stored", tmp_path / "taken")) is None
    fetched = hosts.hosts[1].disk / "stored/checkpoints/fetched/of_workers"
    assert [*fetched.glob("global_step_*")], "the other host has what it has fetched, and nothing else"

    status, said = cluster.run("stored", *store, "resume=latest", f"trainer.total_steps={STEPS + 1}", num_hosts=1)
    assert status == 0, said
    assert "Resuming from" in said
