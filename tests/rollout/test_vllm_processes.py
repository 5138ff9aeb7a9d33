"""vLLM beside each of two processes: together they draw what our own loop draws in one, before and after an update."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rollout.engines import agreement, save_family
from trainer.runs import GRPO, ppo_run

from verl.description import BuildContext
from verl.engines.sharding import DDP, FSDP
from verl.protocol import DataProto
from verl.rollout.base import Request
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.options import VLLMRollout

pytestmark = pytest.mark.xdist_group("vllm")
ROLLOUT = VLLMRollout(max_new_tokens=8, kv_cache_gib=0.05, max_num_seqs=16, num_threads=1)


def drawn(model, directory, rollout, **parts):
    """The responses of two steps, an update between them."""
    algorithm = dataclasses.replace(GRPO, mini_batches=1)
    run = ppo_run(model, algorithm, rollout=rollout, lr=1e-2, prompts_per_step=4, total_steps=4, **parts)
    with run.build(BuildContext(run_dir=directory)) as trainer:
        batches = [trainer.train_data.collate(trainer.sampler.next_batch()) for _ in range(2)]
        grouped = [batch.union(DataProto.from_dict({"group_ids": torch.arange(4)})) for batch in batches]
        first = trainer.generate(grouped[0], Request(1, 2))
        metrics = trainer.step(batches[0], 1)
        return first, trainer.generate(grouped[1], Request(2, 2)), metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What one process draws with the very weights that it trains."""
    return drawn(model, tmp_path_factory.mktemp("one"), HFRollout(max_new_tokens=8))


@pytest.mark.parametrize("sharding", [FSDP(), pytest.param(DDP(), marks=pytest.mark.exhaustive)], ids=["fsdp", "ddp"])
def test_two_processes_with_an_engine_each_draw_as_one_does(sharding, model, alone, tmp_path):
    *found, metrics = drawn(model, tmp_path, ROLLOUT, sharding=sharding, n_gpus_per_node=2)
    for expected, rows in zip(alone, found, strict=False):
        same, gap = agreement(expected, rows)
        assert same == 1
        assert gap < 1e-3
    assert metrics["sync/probe_gap_nats"] < 1e-4
    assert metrics["sync/unproven_tensors"] == 0
    assert metrics["actor/loss"] == pytest.approx(alone[2]["actor/loss"], abs=1e-4)
