"""A run that changes its sharding and its number of processes at each checkpoint trains what one process trains."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from cluster.processes_of import wait_until_gone, workers_of
from trainer.runs import PPO, ppo_run, weights

from verl.checkpoint.settings import Checkpointing
from verl.description import BuildContext
from verl.engines.sharding import FSDP, TP, TPFSDP, NoSharding, Sharding

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.exhaustive]

CHAIN: list[tuple[Sharding, int]] = [
    (NoSharding(), 1),
    (FSDP(), 2),
    (TPFSDP(), 4),
    (TP(), 2),
    (FSDP(), 1),
    (NoSharding(), 1),
]


def step_of(model, directory: Path, step: int, sharding: Sharding, processes: int):
    """Go on from the newest checkpoint up to a step, and save it."""
    run = ppo_run(model, PPO, total_steps=len(CHAIN), stop_after=step, sharding=sharding, n_gpus_per_node=processes)
    checkpoint = Checkpointing(save_dir=str(directory / "checkpoints"), save_interval=1, keep_last_n=None)
    run = dataclasses.replace(run, checkpoint=checkpoint, resume=None if step == 1 else "latest")
    with run.build(BuildContext(run_dir=directory / f"run_{step}")) as trainer:
        assert trainer.fit().steps == step


def test_a_chain_of_shardings_ends_where_one_process_does(model64, tmp_path, caplog):
    for step, (sharding, processes) in enumerate(CHAIN, start=1):
        step_of(model64, tmp_path / "chain", step, sharding, processes)
        step_of(model64, tmp_path / "alone", step, NoSharding(), 1)
        of_chain, alone = (weights(tmp_path / name / f"checkpoints/global_step_{step}") for name in ("chain", "alone"))
        assert of_chain.keys() == alone.keys()
        del of_chain["rng/torch.safetensors:torch"], alone["rng/torch.safetensors:torch"]
        gaps = {name: float((x.double() - alone[name].double()).abs().max()) for name, x in of_chain.items()}
        assert {name: gap for name, gap in gaps.items() if not gap <= 1e-9} == {}, f"step {step}"
        assert {name: x.dtype for name, x in of_chain.items()} == {name: x.dtype for name, x in alone.items()}
    assert any(x.dtype == torch.float64 for x in alone.values())
    assert "FSDP has one process, and divides nothing" in caplog.text
    assert wait_until_gone(workers_of(os.getpid())) == []
