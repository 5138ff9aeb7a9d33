"""A child of the harness: what it is started with, what it says, and how it ends, whatever state it is in."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from verl.utils.child_process.process import ChildLog, ChildProcess
from verl.utils.progress import Progress, state_of

CHILD = """
import atexit, os, subprocess, sys
from verl.utils.child_process.process import run_child

def serve(channel, setting, progress):
    progress.advance("serving", slot=1)
    print("a line of the child", flush=True)
    while True:
        order = channel.receive()
        if order == "start another":
            channel.send(subprocess.Popen(["sleep", "600"]).pid)
        elif order == "exit":
            sys.exit(3)
        elif order == "say something at the end":
            atexit.register(print, "the exit function was called")
        else:
            channel.send((setting, sys.path[0], sorted(name for name in os.environ if name.startswith("VERL_"))))

if __name__ == "__main__":
    run_child("echoing_child")
"""


def is_gone(pid: int) -> bool:
    return state_of(pid) in ("it is gone", "it has ended")


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "echoing_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "of the parent"), *sys.path])
    with closing(Progress(2)) as progress, closing(ChildLog(tmp_path / "log")) as log:
        child = ChildProcess("echoing_child", progress, slot=1, output=log.file)
        child.begin({"a": 1})
        yield child, progress, log
        child.kill()
        child.kill()
        assert is_gone(child.pid)


def test_a_child_gets_its_setting_and_its_parents_paths_and_hands_nothing_of_the_harness_on(child, tmp_path):
    child, progress, log = child
    child.channel.send("tell")
    setting, path, variables = child.channel.receive(timeout_s=60)
    assert (setting, path) == ({"a": 1}, str(tmp_path / "of the parent"))
    assert not {"VERL_PARENT", "VERL_CHANNEL", "VERL_PROGRESS"} & set(variables)
    assert progress.stage(1) == "serving"
    assert log.text(0) == "a line of the child\n"
    child.end(timeout_s=30)
    assert child.exit_code() == 0


def test_a_child_whose_parent_hangs_up_calls_its_exit_functions_and_ends_with_0(child):
    child, _, log = child
    child.channel.send("say something at the end")
    child.channel.close()
    assert child.await_exit(60.0) == 0
    assert "the exit function was called" in log.text(0)


def test_a_stopped_child_is_ended_with_what_it_has_started(child):
    child, _, _ = child
    child.channel.send("start another")
    other = child.channel.receive(timeout_s=60)
    os.kill(child.pid, signal.SIGSTOP)
    while not child.is_stopped():
        time.sleep(0.01)
    assert child.is_alive()
    with pytest.raises(TimeoutError):
        child.channel.receive(timeout_s=0.1)
    child.end(timeout_s=0.1)
    assert is_gone(child.pid)
    assert is_gone(other)


def test_a_child_that_is_stopped_ends_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "echoing_child.py").write_text(CHILD)
    code = """
import os, signal
from verl.utils.child_process.process import ChildProcess
from verl.utils.progress import Progress
progress = Progress(2)
child = ChildProcess("echoing_child", progress, slot=1)
child.begin(None)
child.channel.send("tell")
child.channel.receive(timeout_s=60)
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    environment = os.environ | {"PYTHONPATH": paths}
    told = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    pid, deadline = int(told.stdout.split()[-1]), time.monotonic() + 30
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)
