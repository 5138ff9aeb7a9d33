"""A run with vLLM is stopped by the first sync that brings nothing, with the tensors named."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from random_models import save_random_model
from trainer.runs import GRPO_ALGORITHM, JSONL, ppo_run, step_lines

from verl.component import BuildContext
from verl.errors import WeightSyncError
from verl.models.pretrained import Pretrained

pytest.importorskip("verl.rollout.vllm")
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.weight_sync.sync import WeightSync
from verl.rollout.weight_sync.transfer import RankTransfer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def send_twice(monkeypatch) -> None:
    """Only the first syncs are sent: the one before the first step, and that after it."""
    push, sent = WeightSync.push, []

    def forgetful(sync: WeightSync, weights: Any, question: Any) -> RankTransfer:
        sent.append(question)
        if len(sent) <= 2:
            return push(sync, weights, question)
        for weight in weights:
            sync.engine.verifier.add_fingerprint(weight.name, weight.make())
        return RankTransfer()

    monkeypatch.setattr(WeightSync, "push", forgetful)


@pytest.mark.exhaustive
def test_a_sync_that_brings_nothing_stops_the_run(tmp_path, monkeypatch):
    send_twice(monkeypatch)
    path = tmp_path / "model"
    save_random_model(path, "qwen2", torch.float32, hidden_size=128, tie_word_embeddings=True)
    rollout = VLLMRollout(max_new_tokens=5, max_num_seqs=8, start_timeout_s=600)
    run = ppo_run(Pretrained(path=str(path)), GRPO_ALGORITHM, lr=1e-5, total_steps=3, rollout=rollout, tracker=JSONL)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer, pytest.raises(WeightSyncError) as caught:
        trainer.fit()
    steps = step_lines(tmp_path)
    assert len(steps) == 1
    assert float(steps[0]["rollout/log_prob_gap_nats"]) < 1e-4
    assert {"lm_head.weight", "model.layers.1.mlp.down_proj.weight"} <= set(caught.value.names)
    assert "it is stale: it holds what the sync before brought" in str(caught.value)
