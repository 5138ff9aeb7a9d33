"""What a killed process leaves is removed, whether what it had started is killed too, stopped, or going on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.processes_of import is_running, wait_until_gone

import verl
from verl.utils.orphan_cleanup import OrphanCleanup

ROOT = Path(verl.__file__).parents[1]
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from verl.utils.orphan_cleanup import CLEANUP
directory, prefix, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
CLEANUP.register(directories=[directory], shared_memory=[prefix])
(directory / "below").mkdir(parents=True)
(directory / "below/file").write_text("")
Path(f"/dev/shm/{prefix}_one").write_text("")
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], process_group=0)
CLEANUP.register(process_groups=[child.pid])
number = CLEANUP.register(directories=[directory.parent])
CLEANUP.withdraw(number)
CLEANUP.withdraw(number)
if how == "forked" and os.fork() == 0:
    time.sleep(600)  # holds no end of the pipe
print(child.pid, CLEANUP.process.pid, flush=True)
if how == "ends":
    sys.exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "stopped child", "forked", "ends"])
def test_nothing_is_left_of_an_owner_that_is_killed_or_ends_without_tidying_up(how, tmp_path):
    directory, prefix = tmp_path / "kept/owned", f"verl_test_{os.getpid()}_{time.monotonic_ns()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), prefix, how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        child, cleaner = map(int, owner.stdout.readline().split())
        if how == "stopped child":
            os.kill(child, signal.SIGSTOP)
        if how != "ends":
            assert is_running(cleaner)
            owner.kill()
        assert owner.wait() == (3 if how == "ends" else -signal.SIGKILL)
        assert wait_until_gone([child, cleaner]) == []
        assert not directory.exists()
        assert directory.parent.exists()
        assert [name for name in os.listdir("/dev/shm") if name.startswith(prefix)] == []
    finally:
        os.killpg(owner.pid, signal.SIGKILL) if how == "forked" else owner.kill()


def test_a_clean_up_process_that_is_stopped_blocks_nobody_who_registers():
    cleanup = OrphanCleanup()
    cleanup.register()
    cleanup.process.send_signal(signal.SIGSTOP)
    for _ in range(1000):  # more than its pipe holds
        cleanup.register(shared_memory=[f"verl_test_{'x' * 200}"])
    cleanup.close()
    assert cleanup.process is None


def is_ignored(pid: int, number: int) -> bool:
    """Whether a process has come to the place where it ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored.split()[1], 16) >> (number - 1) & 1)


def test_signals_to_all_processes_of_a_job_leave_it_running_until_its_owner_ends():
    cleanup = OrphanCleanup()
    cleanup.register()
    process = cleanup.process
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    while not all(is_ignored(process.pid, number) for number in numbers):
        time.sleep(0.01)
    for number in numbers:
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None
    cleanup.close()
    assert process.returncode == 0
    assert os.getsid(0) != process.pid
