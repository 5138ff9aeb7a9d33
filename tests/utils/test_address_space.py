"""Runs under `ulimit -v`: a limit that is too low is refused, and a run that reaches its limit says so."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest
from cases import exhaustive

from verl.utils import memory
from verl.utils.memory import out_of_memory_message

GIB = 2**30


def run_limited(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "verl.cli", *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    "words", [("ppo", "debug=smoke"), *exhaustive(("sft", "debug=smoke"), ("checkpoint", "ls", "."))]
)
def test_a_limit_below_what_pytorch_maps_is_refused_at_the_start(words, tmp_path):
    directory = [f"hydra.run.dir={tmp_path / 'run'}"] if words[0] in ("sft", "ppo") else []
    done = run_limited(GIB, *words, *directory)
    assert done.returncode == 2, done.stderr
    assert "limited to 1.00 GiB (`ulimit -v`)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_run_that_reaches_its_limit_says_so_without_a_traceback(tmp_path):
    words = ["actor.model.hidden_size=2048", "actor.model.intermediate_size=16384", "actor.model.num_layers=4"]
    done = run_limited(2 * GIB, "sft", "debug=smoke", *words, f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 1, done.stderr
    assert "its address space is limited to 2.00 GiB (`ulimit -v`)" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_of_other_causes_have_no_such_message(monkeypatch):
    assert out_of_memory_message(RuntimeError("shapes differ")) is None
    assert "is used up" in str(out_of_memory_message(MemoryError()))
    assert "Cannot allocate" in str(out_of_memory_message(OSError(errno.ENOMEM, "Cannot allocate memory")))
    monkeypatch.setattr(memory, "_space_limit", lambda: 100 * GIB)
    assert out_of_memory_message(RuntimeError("could not create a primitive")) is None
    monkeypatch.setattr(memory, "_space_limit", lambda: memory._space_peak())
    message = out_of_memory_message(RuntimeError("could not create a primitive\nat line 3"))
    assert "(RuntimeError: could not create a primitive)" in message
