"""`make gpu` as far as it goes without a GPU: measurements run small, what is lacking is named, nothing is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from gpu.needs import gpus, vllm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: make gpu runs all of it")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def command():
    spec = importlib.util.spec_from_file_location("gpu_command", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_measurement_runs(command):
    found = command.measure("cpu", small=True)
    assert set(found) == {"training", "sampling", "saving"}
    assert not {name: told["error"] for name, told in found.items() if "error" in told}
    assert found["training"]["tokens_per_s"] > 0
    assert 0 < found["sampling"]["share_of_decode_step"] < 1


def test_without_a_gpu_it_says_so_and_writes_nothing(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    assert command.main() == 2
    assert "needs a CUDA device, and torch finds none here" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_what_a_machine_lacks_is_named():
    assert gpus(2)[1].kwargs == {"reason": "needs 2 CUDA devices; this machine has 0"}
    assert gpus()[1].args == (True,)
    assert "a CUDA device" in vllm().kwargs["reason"]
