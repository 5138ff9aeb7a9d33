"""A run that changes its sharding and its number of processes at each checkpoint trains what one process trains."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from cluster.processes_of import wait_until_gone, workers_of
from cluster.ray_here import placed
from random_models import save_random_model
from trainer.runs import PPO_ALGORITHM, ppo_run

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.component import BuildContext
from verl.engines.sharding import DDP, FSDP, TP, TPFSDP, NoSharding, Parallel, Sharding
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.exhaustive, pytest.mark.slow]

Chain = list[tuple[Sharding, int, bool]]  # the last: in Ray
CHAIN: Chain = [
    (NoSharding(), 1, False),
    (FSDP(), 2, False),
    (TPFSDP(), 4, False),
    (DDP(timeout_s=60.0), 2, True),
    (TP(), 2, False),
    (Parallel(cp=2), 2, False),
    (Parallel(cp=2, tp=2, cp_style="ulysses"), 4, False),
    (Parallel(cp=2), 4, False),
    (FSDP(), 1, False),
    (NoSharding(), 1, False),
]
STAGES: Chain = [
    (NoSharding(), 1, False),
    (Parallel(pp=2), 2, False),
    (Parallel(pp=2, tp=2), 4, False),
    (Parallel(pp=2, dp_replicate=2), 4, False),
    (Parallel(pp=2, dp_shard=2), 4, False),
    (FSDP(), 2, False),
    (Parallel(pp=2, cp=2), 4, False),
    (Parallel(pp=2, pp_schedule="gpipe"), 2, False),
    (NoSharding(), 1, False),
]
EXPERTS: Chain = [
    (NoSharding(), 1, False),
    (Parallel(pp=2), 2, False),
    (Parallel(pp=2, tp=2), 4, False),
    (Parallel(cp=2), 4, False),
    (Parallel(ep=2), 2, False),
    (Parallel(ep=2, dp_replicate=2), 4, False),
    (Parallel(ep=2, cp=2), 4, False),  # experts of a process are divided over two
    (Parallel(ep=2, pp=2), 4, False),
    (NoSharding(), 1, False),
]


def step_of(model, directory: Path, step: int, sharding: Sharding, processes: int, in_ray: bool, lora: LoRA | None):
    """Go on from the newest checkpoint up to a step, and save it."""
    layout = {"sharding": sharding, "n_gpus_per_node": processes, "placement": placed() if in_ray else None}
    run = ppo_run(model, PPO_ALGORITHM, total_steps=len(CHAIN), stop_after=step, **layout)
    checkpoint = Checkpointing(save_dir=str(directory / "checkpoints"), save_interval=1, keep_last_n=None)
    roles = {name: dataclasses.replace(getattr(run, name), lora=lora) for name in ("actor", "critic")}
    run = dataclasses.replace(run, **roles, checkpoint=checkpoint, resume=None if step == 1 else "latest")
    with run.build(BuildContext(run_dir=directory / f"run_{step}")) as trainer:
        assert trainer.fit().steps == step


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that was trained, by component and name, whoever wrote it."""
    reader = CheckpointReader(open_checkpoint(FileSystem(), checkpoint))
    return {
        tensor.full_name: as_tensor(reader.tensor(tensor.component, tensor.name), tensor)
        for tensor in reader.checkpoint.manifest.tensors
        if tensor.component != "rng"  # each process has generators
    }


def assert_ends_where_one_process_does(
    chain: Chain, model, directory: Path, lora: LoRA | None, tolerance: float = 1e-9
) -> None:
    for step, (sharding, processes, in_ray) in enumerate(chain, start=1):
        step_of(model, directory / "chain", step, sharding, processes, in_ray, lora)
        step_of(model, directory / "alone", step, NoSharding(), 1, False, lora)
        of_chain, alone = (
            tensors_of(directory / name / f"checkpoints/global_step_{step}") for name in ("chain", "alone")
        )
        assert of_chain.keys() == alone.keys()
        gaps = {name: float((x.double() - alone[name].double()).abs().max()) for name, x in of_chain.items()}
        assert {name: gap for name, gap in gaps.items() if not gap <= tolerance} == {}, f"step {step}"
        assert {name: x.dtype for name, x in of_chain.items()} == {name: x.dtype for name, x in alone.items()}
    assert any(x.dtype == torch.float64 for x in alone.values())
    assert wait_until_gone(workers_of(os.getpid())) == []


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapter"])
def test_a_chain_of_shardings_ends_where_one_process_does(lora, model64, tmp_path, caplog):
    assert_ends_where_one_process_does(CHAIN, model64, tmp_path, lora)
    assert "FSDP has one process, so nothing is sharded" in caplog.text


@pytest.mark.parametrize(("lora", "tied"), [(None, False), (None, True), (LoRA(rank=2), False)])
def test_a_chain_through_pipeline_stages_ends_where_one_process_does(lora, tied, tmp_path):
    options = {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    path = save_random_model(tmp_path / "model", "starcoder2", torch.float64, **options)
    assert_ends_where_one_process_does(STAGES, Pretrained(path=str(path), dtype="float64"), tmp_path, lora)


def test_a_chain_through_expert_parallelism_ends_where_one_process_does(tmp_path):
    path = save_random_model(tmp_path / "model", "qwen3_moe", torch.float64)
    model = Pretrained(path=str(path), dtype="float64")
    assert_ends_where_one_process_does(EXPERTS, model, tmp_path, None, 1e-5)  # norms in float32, by AdamW
