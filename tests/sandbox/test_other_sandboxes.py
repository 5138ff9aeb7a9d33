"""`sandbox=none`: no jail, only limits."""

import logging

import pytest

from verl.component import BuildContext
from verl.errors import SandboxError
from verl.sandbox.base import Program
from verl.sandbox.unprotected import Unprotected


@pytest.fixture
def runner():
    made = Unprotected(max_output_kib=16).build(BuildContext())
    yield made
    made.close()
    with pytest.raises(SandboxError, match="was closed"):
        made.run("1")


@pytest.mark.slow
def test_outcomes_are_those_of_a_jail(runner):
    result = runner.run("print(input(), open('a/b').read())\nraise SystemExit(4)", {"a/b": "ä"}, stdin="ö\n")
    assert (result.outcome, result.stdout, result.exit_status) == ("error", "ö ä\n", 4)
    programs = [
        Program("print('fine')"),
        Program("import time; print('so far', flush=True); time.sleep(60)", timeout_s=3.0),
        Program("bytearray(1 << 31)"),
        Program("while True: print('x' * 1000)"),
        Program("import os; os.abort()"),
    ]
    results = runner.run_all(programs)
    assert [result.outcome for result in results] == ["ok", "timeout", "memory", "output", "error"]
    assert results[1].stdout == "so far\n"
    assert len(results[3].stdout) == 16 * 1024
    assert results[4].exit_status == 134


def test_none_says_in_capitals_what_it_does(caplog):
    with caplog.at_level(logging.WARNING):
        Unprotected().build(BuildContext())
    assert "RUNS ON THIS MACHINE WITH ALL RIGHTS OF YOUR USER" in caplog.text
