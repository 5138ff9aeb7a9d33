"""An exit of a component is an error that names its line; Ctrl-C and the run's own end stay what they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import verl
from verl.errors import ComponentExit
from verl.utils.signals import StopRequest, component_exits, raised_by_code

ROOT = Path(verl.__file__).parents[1]
EXITS = {
    "sys.exit(0)": r"raised SystemExit\(0\): sys.exit\(0\)",
    "sys.exit()": r"raised SystemExit\(0?\): sys.exit\(\)",  # W&B, once imported, puts a zero there
    "sys.exit('no data')": r"raised SystemExit\('no data'\)",
    "exit()": r"raised SystemExit\(\): exit\(\)",
    "os._exit(0)": r"called os._exit\(0\): os._exit\(0\)",
    "raise KeyboardInterrupt": "raised KeyboardInterrupt, and nobody had pressed Ctrl-C",
}


@pytest.fixture
def component(tmp_path):
    """A function of a user's file that does what it is told."""

    def make(does: str):
        file = tmp_path / "component.py"
        file.write_text(f"import os, sys\n\ndef act():\n    {does}\n")
        names: dict = {}
        exec(compile(file.read_text(), str(file), "exec"), {"exit": exit}, names)
        names["act"].__globals__.update(names)
        return names["act"]

    return make


@pytest.mark.parametrize("does", EXITS)
def test_an_exit_is_raised_with_the_line_that_wanted_it(does, component):
    act = component(does)
    before = os._exit, signal.getsignal(signal.SIGINT)
    with pytest.raises(ComponentExit, match=rf"^act\(\) at line 4 of \S+component.py {EXITS[does]}"), component_exits():
        act()
    assert (os._exit, signal.getsignal(signal.SIGINT)) == before


def test_errors_and_nested_exits_are_told_once(component):
    with pytest.raises(ZeroDivisionError), component_exits(), component_exits():
        raise ZeroDivisionError
    with pytest.raises(ComponentExit, match="act") as found, component_exits(), component_exits():
        component("sys.exit(3)")()
    assert isinstance(found.value.__cause__, SystemExit)


@pytest.mark.parametrize("handling", [component_exits, lambda: StopRequest().listening()])
def test_a_real_interruption_stays_one(handling):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the first is a request where a run listens

    with pytest.raises(KeyboardInterrupt), component_exits(), handling():
        interrupt()


def test_where_nobody_notes_signals_an_interruption_is_taken_for_a_real_one():
    assert not raised_by_code(KeyboardInterrupt())
    assert raised_by_code(SystemExit())
    found = []
    thread = threading.Thread(target=lambda: found.append(raised_by_code(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("threading.Thread(target=lambda: os._exit(0)).start(); time.sleep(60)", 1, "called os._exit(0) in a thread"),
        ("p = get_context('fork').Process(target=int); p.start(); p.join(); sys.exit(p.exitcode)", 0, ""),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_threads_end_in_words_and_children_and_the_script_itself_as_they_want(body, status, said, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, threading, time\nfrom multiprocessing import get_context\n"
        "from verl.utils.signals import component_exits\n"
        f"def main():\n    with component_exits(directly=False):\n        {body}\nmain()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
