"""A HybridActor in several processes comes to what one in a single process comes to, to float64 rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hybrid.hybrid_in_processes import course
from random_models import save_random_model
from safetensors.torch import load_file

import verl

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]
PROGRAM = Path(__file__).with_name("hybrid_in_processes.py")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Its heads have norms, which each process has whole."""
    return str(save_random_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", torch.float64))


def together(processes, directory, path, config, lora, loaded):
    """What each of several processes tells, started as torchrun starts them."""
    environment = {**os.environ, "PYTHONPATH": str(Path(verl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(PROGRAM), path, json.dumps(config), json.dumps(lora), str(directory / "together"), loaded]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((directory / f"found_{rank}.json").read_text()) for rank in range(processes)]


def weights(directory):
    return {name: x for file in sorted(Path(directory).glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    ("processes", "config", "lora", "loaded"),
    [
        pytest.param(2, {"tp_size": 2}, None, "", marks=pytest.mark.exhaustive),
        pytest.param(2, {"tp_size": 2}, {"rank": 2}, "loaded", marks=pytest.mark.exhaustive),
        pytest.param(2, {"dp_size": 2}, None, "loaded", marks=pytest.mark.exhaustive),
        pytest.param(2, {"fsdp_sharding": "SHARD_GRAD_OP"}, {"rank": 2}, "", marks=pytest.mark.exhaustive),
        pytest.param(4, {"tp_size": 2, "dp_size": 2}, None, "", marks=pytest.mark.exhaustive),
        pytest.param(4, {"tp_size": 2, "fsdp_sharding": "HYBRID_SHARD"}, None, "", marks=pytest.mark.exhaustive),
    ],
)
def test_several_processes_train_and_sample_as_one_does(processes, config, lora, loaded, path, tmp_path):
    found = together(processes, tmp_path, path, config, lora, loaded)
    alone = course(path, {}, lora, tmp_path / "alone")
    groups = found[0]["groups"]
    first = {answer["group"]: answer for answer in reversed(found)}
    for one, *others in zip(alone["losses"], *(first[group]["losses"] for group in range(groups)), strict=True):
        assert sum(others) == pytest.approx(one, abs=1e-9)
    for answer in found:
        assert answer["norms"] == pytest.approx(alone["norms"], abs=1e-9)
        assert answer["greedy"] == alone["greedy"]
        assert answer["processes"] == f"{processes} processes {list(range(processes))} over gloo"
        if groups == 1:
            assert answer["texts"] == alone["texts"]
            assert answer["refused"].startswith("input_ids differ between tensor-parallel processes")
            assert answer["changed"].startswith("model has changed at added")
            assert answer["replaced"].startswith("model cannot be replaced: it is sharded over processes")
            assert answer["adapter"] == found[0]["adapter"]
            assert answer["heads"] == found[0]["heads"]
        else:
            assert answer["texts"] == first[answer["group"]]["texts"]
    if groups == 1:
        assert len({answer["drew"] for answer in found}) == processes  # each has its own generator back
    expected, saved = weights(tmp_path / "alone"), weights(tmp_path / "together")
    assert saved.keys() == expected.keys()
    for name, x in saved.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-9)
