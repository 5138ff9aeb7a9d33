"""Two hosts, each with its own disk, that torchrun has started: train, save, lose one, resume; without Ray."""

from __future__ import annotations

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
from faults.test_two_hosts import RULE
from faults.two_hosts import DISK, Host, TwoHosts, two_hosts, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("two hosts"),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"two hosts: {WHY_NOT}"),
]
STEPS = 5
LIMIT_S = 400.0


class Launcher:
    """Runs over both hosts, each by its name: `NAME/run` and `NAME/checkpoints` on the disk of the driver's host."""

    def __init__(self, hosts: TwoHosts, model: Path, shared: Path):
        self.hosts, self._model, self._shared, self._port = hosts, model, shared, 29600
        (shared / "rate.py").write_text(RULE)

    def start(self, name: str, *more: str) -> list[subprocess.Popen[str]]:
        """torchrun on each host; the driver is that of the first."""
        self._port += 1
        run = ["ppo", "algorithm=grpo", "actor=pretrained", f"actor.model.path={self._model}", "reward=function"]
        run += [f"reward.path={self._shared}/rate.py:variety", "actor.optimizer.lr=1e-3", "rollout.max_new_tokens=6"]
        run += ["sharding=fsdp", "trainer.prompts_per_step=4", "trainer.group_size=2", f"trainer.total_steps={STEPS}"]
        run += ["data.held_out=4", "trainer.eval_interval=100", "trainer.eval_before=false", "trainer.num_threads=1"]
        run += ["checkpoint.save_interval=1", "trainer.save_final=false", "tracker.curves=null"]
        run += [f"hydra.run.dir={DISK}/work/{name}/run", f"checkpoint.save_dir={DISK}/work/{name}/checkpoints"]
        run += [f"trainer.experiment_name={name}", *more]
        first, started = self.hosts.driver.address, []
        for rank, host in enumerate(self.hosts.hosts):
            torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
            torchrun += [f"--master-addr={first}", f"--master-port={self._port}"]
            started.append(host.start(sys.executable, *torchrun, "-m", "verl.cli", *run))
        return started

    def run(self, name: str, *more: str) -> list[tuple[int, str]]:
        """To the end: status and output of each host."""
        return [self.ended(one) for one in self.start(name, *more)]

    @staticmethod
    def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
        said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def start_until_saved(self, name: str, place: str, *more: str) -> list[subprocess.Popen[str]]:
        """A run, once something is in its directory of checkpoints."""
        started, end = self.start(name, *more), time.monotonic() + LIMIT_S
        while not (self.hosts.driver.disk / name / "checkpoints" / place).exists():
            time.sleep(0.1)
            assert time.monotonic() < end, [one.kill() or one.communicate()[0] for one in started]
            assert started[0].poll() is None, [one.kill() or one.communicate()[0] for one in started]
        return started

    def taken(self, name: str, to: Path) -> Path:
        """A copy of what a run has written on the driver's host."""
        shutil.copytree(self.hosts.driver.disk / name, to / name, symlinks=True)
        return to / name


def workers_on(host: Host) -> list[int]:
    """Process ids of the workers of a host."""
    namespace, found = Path(f"/proc/{host.init}/ns/pid").readlink(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"verl.cluster.worker" in (process / "cmdline").read_bytes().split(b"\0"):
                found += [int(process.name)] if (process / "ns/pid").readlink() == namespace else []
        except OSError:
            continue
    return found


@pytest.fixture
def launcher(dir32: Path, tmp_path: Path) -> Iterator[Launcher]:
    with two_hosts(in_ray=False) as hosts:
        yield Launcher(hosts, dir32, tmp_path)


def test_hosts_without_a_shared_disk_train_and_resume_where_the_checkpoint_is(launcher, tmp_path):
    hosts = launcher.hosts
    (status, said), (other, said_there) = launcher.run("whole")
    assert (status, other) == (0, 0), said + said_there
    assert "torchrun has started 2 processes on 2 hosts: trainer.nnodes=2" in said
    assert "cannot see /mnt/work/whole/checkpoints as the driver does" in said
    whole = launcher.taken("whole", tmp_path / "taken")
    assert steps_saved(whole) == [*range(1, STEPS + 1)][-len(steps_saved(whole)) :]
    assert not [*hosts.hosts[1].disk.iterdir()], "only the driver's host has anything"

    first, second = launcher.start_until_saved("lost", "global_step_2")
    hosts.hosts[1].power_off()  # without a word: its processes and its disk are gone
    status, said = launcher.ended(first)
    second.communicate()
    assert status == 1, said
    assert re.search(r"rank 1 failed in [\w.]+ at step \d", said), said
    assert "hostb" in said
    hosts.replace(2)

    (status, said), _ = launcher.run("lost", "resume=latest")
    assert status == 1, said
    assert "which the run resumes from, is not on the machine hostb: each machine reads the checkpoint" in said
    saved = f"lost/checkpoints/{(hosts.driver.disk / 'lost/checkpoints/latest').readlink()}"
    shutil.copytree(hosts.driver.disk / saved, hosts.hosts[1].disk / saved)  # as the message says
    (status, said), (other, said_there) = launcher.run("lost", "resume=latest")
    assert (status, other) == (0, 0), said + said_there
    assert first_difference(whole, launcher.taken("lost", tmp_path / "taken")) is None


def test_a_worker_that_is_killed_or_stopped_on_the_other_host_is_named_and_nothing_is_left(launcher):
    for name, number, told in (
        ("killed", signal.SIGKILL, r"rank 1 failed in [\w.]+ at step \d[\s\S]*on hostb ended with signal SIGKILL"),
        ("stopped", signal.SIGSTOP, r"rank 1 failed in [\w.]+ at step \d[\s\S]*it is stopped \(SIGSTOP"),
    ):
        started = launcher.start_until_saved(name, "global_step_1", "sharding.call_timeout_s=5")
        (worker,) = workers_on(launcher.hosts.hosts[1])
        subprocess.run(["kill", f"-{int(number)}", str(worker)], check=True)
        (status, said), (other, _) = (launcher.ended(one) for one in started)
        assert (status, other) == (1, 1), said
        assert re.search(told, said), said
        assert [workers_on(host) for host in launcher.hosts.hosts] == [[], []]


def test_with_a_store_hosts_whose_disks_are_lost_go_on(launcher, tmp_path):
    hosts, store = launcher.hosts, ["storage=local", f"storage.path={tmp_path}/store"]
    assert [status for status, _ in launcher.run("whole")] == [0, 0]
    whole = launcher.taken("whole", tmp_path / "taken")
    started = launcher.start_until_saved("stored", "uploaded/global_step_2", *store)
    hosts.replace(1, 2)
    for one in started:
        one.communicate(timeout=LIMIT_S)
    (status, said), (other, said_there) = launcher.run("stored", *store, "resume=latest")
    assert (status, other) == (0, 0), said + said_there
    assert "machines that do not have the checkpoint fetch it from" in said
    assert first_difference(whole, launcher.taken("stored", tmp_path / "taken")) is None
    assert [*(hosts.hosts[1].disk / "stored/checkpoints/fetched/of_workers").glob("global_step_*")]
