"""An exit of a component is an error that names its line; Ctrl-C and the run's own end stay what they are."""

import os
import signal
import sys

import pytest

from verl.errors import ComponentExit
from verl.utils.signals import StopRequest, component_exits

EXITS = {
    "sys.exit(0)": r"raised SystemExit\(0\): sys.exit\(0\)",
    "sys.exit()": r"raised SystemExit\(0?\): sys.exit\(\)",  # W&B, once imported, puts a zero there
    "sys.exit('no data')": r"raised SystemExit\('no data'\)",
    "exit()": r"raised SystemExit\(\): exit\(\)",
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
    with pytest.raises(ComponentExit, match=rf"^act\(\) at line 4 of \S+component.py {EXITS[does]}"), component_exits():
        act()


def test_errors_and_nested_exits_are_told_once(component):
    with pytest.raises(ZeroDivisionError), component_exits(), component_exits():
        raise ZeroDivisionError
    with pytest.raises(ComponentExit, match="act") as found, component_exits(), component_exits():
        component("sys.exit(3)")()
    assert isinstance(found.value.__cause__, SystemExit)


def test_an_interruption_stays_one():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the first is a request where a run listens

    with pytest.raises(KeyboardInterrupt), component_exits(), StopRequest().listening():
        interrupt()


def test_the_script_itself_may_exit():
    with pytest.raises(SystemExit), component_exits(directly=False):
        sys.exit(0)
