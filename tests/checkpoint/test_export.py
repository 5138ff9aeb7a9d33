"""What is exported opens without us, and holds the very weights."""

import json
import subprocess
import sys

import numpy as np
import peft
import pytest
import torch
from checkpoint.rank_tensors import RankTensor, write_tensors
from golden_run import golden_run
from transformers import AutoModelForCausalLM

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.export import export
from verl.checkpoint.manager import CheckpointManager


@pytest.fixture
def manager(tmp_path) -> CheckpointManager:
    return CheckpointManager(golden_run(tmp_path / "checkpoints"))


def test_transformers_opens_what_was_exported(manager, tmp_path):
    names = export(manager, tmp_path / "a/b/model")
    assert names == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a/b/model")
    for name, weight in manager.load("actor").items():
        assert torch.equal(model.state_dict()[name], weight)


def sliced_critic(directory) -> CheckpointManager:
    """A model whose only weight was cut between two writers, and an adapter."""
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    store = CheckpointStore(directory)
    with store.begin(1) as transaction:
        transaction.main.write("critic/config.json", [b"{}"])
        for rank in (0, 1):
            part = RankTensor(
                component="critic", name="head", dtype="F32", shape=(6, 4), start=(3 * rank, 0), extent=(3, 4),
                data=values[3 * rank : 3 * rank + 3],
            )  # fmt: skip
            write_tensors(transaction.main, f"critic/rank_{rank}.safetensors", [part])
        transaction.main.write("actor/adapter_config.json", [json.dumps({"peft_type": "LORA"}).encode()])
        whole = RankTensor(component="actor", name="lora_A", dtype="F32", shape=(6, 4), data=values)
        write_tensors(transaction.main, "actor/adapter_model.safetensors", [whole])
        transaction.commit()
    return CheckpointManager(directory)


def test_what_several_writers_cut_comes_out_whole(tmp_path):
    manager = sliced_critic(tmp_path / "checkpoints")
    assert export(manager, tmp_path / "critic", "critic") == ["config.json", "model.safetensors"]
    code = "import sys, safetensors.numpy as s; print(s.load_file(sys.argv[1])['head'].sum())"
    path = str(tmp_path / "critic/model.safetensors")
    assert subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True).stdout == "276.0\n"


def test_an_adapter_stays_an_adapter(tmp_path):
    manager = sliced_critic(tmp_path / "checkpoints")
    export(manager, tmp_path / "adapter")
    loaded = peft.utils.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    assert torch.equal(loaded["lora_A"], torch.arange(24.0).reshape(6, 4))
