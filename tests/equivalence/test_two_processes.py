"""Two processes, started as a run starts them, train exactly what one process does."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from cases import short_where
from cluster.processes_of import wait_until_gone, workers_of
from same_training import ROUNDING, run_course, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import DDP, FSDP, TP
from verl.models.pretrained import Pretrained

pytestmark = pytest.mark.xdist_group("two processes")

# 5, 4 and 1 responses over 2 processes: counts that do not divide, and a process without rows
UNEVEN = [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]
# groups that the processes share, mini-batches of 3 rows and of 1, a process without prompts
GROUPS = [[2, 0, 5], [1]]
CASES = {
    "ppo": (PPO_ALGORITHM, 1, UNEVEN, DDP(timeout_s=60.0)),
    "grpo": (GRPO_ALGORITHM, 3, GROUPS, DDP(timeout_s=60.0)),
    "ppo, each role in its own way": (PPO_ALGORITHM, 1, UNEVEN, FSDP(timeout_s=60.0)),
    "grpo, tp": (GRPO_ALGORITHM, 3, GROUPS, TP(timeout_s=60.0)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", short_where(CASES, "ppo, each role in its own way".__eq__))
def test_two_processes_train_as_one_does(case, model64, dir64, tmp_path):
    algorithm, group_size, prompts, sharding = CASES[case]
    options = {"group_size": group_size}
    alone = run_course(ppo_run(model64, algorithm, **options), prompts, tmp_path / "one")
    shared = ppo_run(model64, algorithm, sharding=sharding, n_gpus_per_node=2, **options)
    if "own way" in case:
        shared = replace(shared, critic=replace(shared.critic, sharding=TP()))
        shared = replace(shared, reference=replace(shared.reference, sharding=DDP()))
    together = run_course(shared, prompts, tmp_path / "two")
    same_training(alone, together, ROUNDING)
    assert wait_until_gone(workers_of(os.getpid())) == []

    start = Pretrained(path=str(dir64), dtype="float64").load_causal_lm("cpu").state_dict()
    moved = max(float((alone.weights[f"actor/model.safetensors:{name}"] - x).abs().max()) for name, x in start.items())
    assert moved > 1e-3  # the steps were not empty
    assert all(torch.isfinite(x).all() for x in alone.weights.values())
