"""An actor over two processes on a pretended device: nothing mixes it with the CPU, at the second sync either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def said_of(out, *words):
    """What each check said. A backend of torch stays in its process for good, so they have one of their own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("second_device.py")), str(out), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return said_of(tmp_path_factory.mktemp("second_device") / "found")


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["on the device", "offloaded"])
def test_scoring_syncs_a_resumed_optimizer_and_a_merged_adapter_run_on_a_device_of_their_own(found, weights):
    assert len(found[weights]) == 13
    assert {name: wrong for name, wrong in found[weights].items() if wrong} == {}


@pytest.mark.exhaustive
def test_planted_faults_are_seen(tmp_path):
    found = said_of(tmp_path / "found", "planted")
    kept = found["planted: the probe keeps what it gathers"]
    wrong = {name for name, said in kept.items() if said}
    assert wrong == {"nothing stays gathered, first", "nothing stays gathered, second"}
    mixed = found["planted: it computes where weights rest"]
    assert mixed["the model computes on the device"]
    assert mixed["rows are packed"]
