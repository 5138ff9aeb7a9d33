"""`make gpu` as far as it goes without a GPU: measurements run small, what is lacking is named, nothing is written."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from cases import short_where
from gpu.needs import gpus, vllm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: make gpu runs all of it")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def command(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_command", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "gpu_command", module)  # a dataclass looks for its module there
    spec.loader.exec_module(module)
    return module


def test_every_measurement_runs(command, monkeypatch):
    monkeypatch.setattr("verl.utils.seeding.seed_everything", lambda seed: None)  # this process runs other tests
    found = {name: work("cpu", True) for name, work in command.MEASURED.items()}
    assert found["training"]["tokens_per_s"] > 0
    assert found["training"]["share_of_product_rate"] > 0
    assert found["decoding"].keys() == {"weights_once_ms", "graphs_2_rows_ms", "kernels_2_rows_ms"}
    assert found["saving"]["mib"] == 4
    assert 0 < found["sampling"]["share_of_decode_step"] < 1


def test_without_a_gpu_it_says_so_and_writes_nothing(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--no-install", "--out", str(tmp_path / "gpu.json")])
    monkeypatch.setattr(command, "hardware", lambda: {"count": 0})
    assert command.main() == 2
    assert "needs a CUDA device, and torch finds none here" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_requirements_that_are_not_met_stop_it_unless_nothing_is_to_be_installed(
    command, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(command, "packages", lambda: {"torch": "2.11.0+cu130 is older than 2.13.0"})
    monkeypatch.setattr(command, "hardware", lambda: {"count": 1})
    monkeypatch.setattr(command, "parts", lambda **_: [])
    out = tmp_path / "gpu.json"
    assert command.run_command(out, is_dry=False, installs=True) == 2
    assert "torch: 2.11.0+cu130 is older than 2.13.0" in capsys.readouterr().out
    assert not out.exists()
    assert command.run_command(out, is_dry=False, installs=False) == 1  # no test has run
    assert command.run_all(out, is_dry=False)["packages"] == command.packages()


PASSES = "def test_it():\n    pass\n"
FILES = {
    "passes": (PASSES, "passed", 0),
    "fails": ("def test_it():\n    assert 1 + 1 == 3\n", "failed", 1),
    "hangs": (f"import time\n{PASSES}\ndef test_more():\n    time.sleep(600)\n", "failed", 1),
    "dies": ("import os\ndef test_it():\n    os._exit(0)\n", "failed", 1),
    "cannot be imported": ("import verl.no_such_module\n", "failed", 1),
    "has no test": ("VALUE = 1\n", "failed", 1),
    "needs what is not here": ("import no_such_distribution\n", "skipped", 1),
    "is skipped": (f"import pytest\n@pytest.mark.skipif(True, reason='needs 9 GPUs')\n{PASSES}", "skipped", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", short_where(FILES, {"fails", "dies", "is skipped"}.__contains__))
def test_a_file_that_fails_hangs_or_runs_no_test_is_told_and_the_exit_status_says_so(
    case, command, monkeypatch, tmp_path
):
    text, outcome, status = FILES[case]
    file = tmp_path / "test_file.py"
    file.write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    part = command.Part("file", ("--tests", str(file)))
    monkeypatch.setattr(command, "parts", lambda **_: [part])
    monkeypatch.setattr(command, "hardware", dict)
    result = command.run_all(tmp_path / "gpu.json", is_dry=False, part_limit_s=8.0 if case == "hangs" else 120.0)
    found = result["parts"]["file"]
    assert found["outcome"] == outcome, found
    assert command.exit_status(result) == status
    assert bool(found["why"]) is (outcome != "passed")
    if case == "hangs":
        assert [told["outcome"] for told in found["found"].values()] == ["passed"]  # what it had done before is kept
    assert json.loads((tmp_path / "gpu.json").read_text()) == result


def test_what_is_known_is_written_after_each_part(command, monkeypatch, tmp_path):
    out, seen = tmp_path / "gpu.json", []

    def run_part(part, limit_s):
        seen.append(list(json.loads(out.read_text())["parts"]) if out.exists() else [])
        return {"outcome": "passed", "why": "", "found": {"test": {"outcome": "passed"}}}

    monkeypatch.setattr(command, "run_part", run_part)
    monkeypatch.setattr(command, "hardware", dict)
    names = [part.name for part in command.parts()]
    result = command.run_all(out, is_dry=False)
    assert seen == [names[:count] for count in range(len(names))]
    assert command.exit_status(result) == 0
    assert {"test_training_on_gpu", "test_vllm_on_gpu", "measure training"} <= set(names)


def test_what_a_machine_lacks_is_named():
    assert gpus(2)[1].kwargs == {"reason": "needs 2 CUDA devices; this machine has 0"}
    assert gpus()[1].args == (True,)
    assert "a CUDA device" in vllm().kwargs["reason"]
