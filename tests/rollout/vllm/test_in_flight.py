"""Weights that vLLM takes between two tokens of its responses."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import pytest
import torch
from roles import start_actor
from rollout.engines import random_prompts, save_family
from same_training import course, same_training, saved
from trainer.runs import GRPO_ALGORITHM, fit

from verl.algorithms.importance_sampling import TruncatedIS
from verl.errors import WeightSyncError
from verl.rollout.base import GenerationRequest
from verl.rollout.vllm.client.turns import VLLMTurns
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.shm_stream import StreamWriter
from verl.workers.schedule import FILE, Schedule, ScheduledEvent
from verl.workers.step_loop import StepLoop

pytestmark = pytest.mark.xdist_group("vllm")

CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)
OPTIONS: dict[str, Any] = {"kv_cache_gib": 0.05, "max_num_seqs": 16, "num_threads": 1, "weight_update": "in_flight"}
EVENTS = [
    ScheduledEvent(0, "weights", 0, 0),
    ScheduledEvent(0, "begin", 1, 0),
    ScheduledEvent(5, "weights", 1, 4),
    ScheduledEvent(5, "begin", 2, 4),
    ScheduledEvent(9, "weights", 2, 8),
    ScheduledEvent(12, "weights", 3, 8),
]


@pytest.mark.exhaustive
def test_equal_prompts_across_three_updates_read_no_key_of_former_weights(tmp_path):
    rollout = VLLMRollout(max_new_tokens=20, min_new_tokens=20, kv_cache="recompute", max_model_len=180, **OPTIONS)
    actor = start_actor(save_family(tmp_path / "model", "qwen2"), rollout)
    first = {name: x.clone() for name, x in actor.model.state_dict().items()}
    loop = StepLoop(actor.sampler, 180, Schedule({}, replayed=EVENTS))
    prompts = random_prompts(2, 150)  # longer than a block of the cache

    def load(version):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in actor.model.state_dict().items():
                x.copy_(first[name] + 0.02 * version * torch.randn(x.shape, generator=generator))
        return actor.sampler.sync()

    try:
        for event in EVENTS:
            if event.event == "weights":
                loop.take_weights(event.number, lambda version=event.number: load(version))
            else:
                loop.begin(prompts, GenerationRequest(event.number, 2))
        batches = [loop.finish(1), loop.finish(2)]
        loop.close()
        assert batches[0]["token_versions"].tolist() == [[0] * 5 + [1] * 4 + [2] * 3 + [3] * 8] * 4
        for rows in batches:
            for version in range(4):
                load(version)
                for row in range(len(rows)):
                    mask, width = rows["attention_mask"][row].bool(), int(rows["prompt_mask"][row].sum())
                    ids, of_version = rows["input_ids"][row][mask], rows["token_versions"][row] == version
                    with torch.no_grad():
                        logits = actor.model(input_ids=ids[None], use_cache=False).logits[0, width - 1 : -1]
                    plain = logits.log_softmax(-1).gather(-1, ids[width:, None])[:, 0]
                    gap = (plain - rows["rollout_log_probs"][row]).abs().mul(of_version).max()
                    assert gap < 1e-4, (version, row)
    finally:
        loop.close()
        actor.close()


def in_flight(model, directory, **options):
    rollout = VLLMRollout(max_new_tokens=24, kv_cache="recompute", **OPTIONS)
    options = {"mode": "async", "max_staleness": 2, "prompts_per_step": 2, "total_steps": 5, **options}
    return course(model, directory, CORRECTED, rollout=rollout, **options)


@pytest.mark.exhaustive
def test_a_replayed_run_and_one_that_is_resumed_in_the_middle_of_responses_have_the_bits_of_the_first(tmp_path):
    model = save_family(tmp_path / "model", "qwen2")
    fit(in_flight(model, tmp_path / "first"), tmp_path / "first/run")
    schedule = (tmp_path / "first/run" / FILE).read_bytes()
    replay = {"replay_schedule": str(tmp_path / "first/run")}
    fit(in_flight(model, tmp_path / "again", **replay), tmp_path / "again/run")
    assert (tmp_path / "again/run" / FILE).read_bytes() == schedule
    same_training(saved(tmp_path / "again"), saved(tmp_path / "first"))
    resume = tmp_path / "first/checkpoints/global_step_2"
    fit(in_flight(model, tmp_path / "cut", resume=resume, **replay), tmp_path / "cut/run")
    assert (tmp_path / "cut/run" / FILE).read_bytes() == schedule
    same_training(saved(tmp_path / "cut"), saved(tmp_path / "first"), after=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", [9, 30])
def test_responses_of_a_killed_engine_begin_anew_by_the_schedule(call, tmp_path, monkeypatch):
    model, advance, calls = save_family(tmp_path / "model", "qwen2"), VLLMTurns.advance, []

    def advance_or_die(self):
        calls.append(1)
        if len(calls) == call:
            os.kill(self.process.process_id, signal.SIGKILL)
        return advance(self)

    monkeypatch.setattr(VLLMTurns, "advance", advance_or_die)
    fit(in_flight(model, tmp_path / "first"), tmp_path / "first/run")
    schedule = (tmp_path / "first/run" / FILE).read_bytes()
    assert schedule.count(b'"lost"') == 1
    replay = {"replay_schedule": str(tmp_path / "first/run")}
    fit(in_flight(model, tmp_path / "again", **replay), tmp_path / "again/run")
    assert (tmp_path / "again/run" / FILE).read_bytes() == schedule
    same_training(saved(tmp_path / "again"), saved(tmp_path / "first"))


@pytest.mark.exhaustive
def test_a_wrong_weight_in_flight_stops_the_run_by_name(tmp_path, monkeypatch):
    fill, wrong, loads = StreamWriter.fill, "model.layers.0.mlp.down_proj.weight", []

    def planted(self, chunks, tensors, *args):
        loads.append(1)
        changed = ((name, x + 1 if name == wrong else x) for name, x in tensors)
        return fill(self, chunks, changed if len(loads) == 3 else tensors, *args)

    monkeypatch.setattr(StreamWriter, "fill", planted)
    run = in_flight(save_family(tmp_path / "model", "qwen2"), tmp_path)
    with pytest.raises(WeightSyncError, match=wrong):
        fit(run, tmp_path / "run")
