"""The role `rollout`: the digests that it gives are of the tensors that it was sent, whatever turns compute in."""

import time
from typing import Any

import pytest
import torch
from cases import exhaustive
from roles import start_actor

from verl.models.lora import LoRA
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.workers.rollout_worker import RolloutWorker, weight_digests
from verl.workers.schedule import Schedule
from verl.workers.step_loop import StepLoop


def sampler_of(model, tokens=40, **options) -> tuple[RolloutWorker, dict[str, torch.Tensor]]:
    """A sampler in flight, with copies of the weights that its actor would be sent."""
    rollout = HFRollout(max_new_tokens=tokens, min_new_tokens=tokens, weight_update="in_flight", kv_cache="keep")
    actor = start_actor(model, rollout, **options)
    sent = {name: x.clone() for name, x in actor.rollout_weights()[1].items()}
    return RolloutWorker(actor.model, actor.generator, StepLoop(actor.generator, 80, Schedule({}))), sent


CASES: dict[str, Any] = {"float32": {}, "autocast": {"autocast": "bfloat16"}}
CASES["lora"] = CASES["autocast"] | {"lora": LoRA(rank=2)}


@pytest.mark.parametrize("case", ["autocast", *exhaustive("float32", "lora")])
def test_digests_of_weights_that_come_within_responses_are_those_of_what_was_sent(case, model32, prompts):
    sampler, sent = sampler_of(model32, **CASES[case])
    sampler.load(0, sent)
    sampler.begin_batch(prompts(), GenerationRequest(1, 2))
    for version in (1, 2):
        weights = {name: x + version / 64 for name, x in sent.items()}
        assert sampler.load(version, weights) == weight_digests(weights)
    rows = sampler.finish_batch(1)[0]
    assert int(rows["token_versions"].max()) == 2
    sampler.close()


def test_digests_of_a_sampler_that_goes_on_within_responses_are_those_of_what_was_sent(model32, prompts, monkeypatch):
    start = StepLoop._start

    def started(loop):
        """Returns once the thread has taken up the open rows."""
        start(loop)
        while loop._batches and loop._turns is None and loop._failure is None:
            time.sleep(0.001)

    monkeypatch.setattr(StepLoop, "_start", started)
    sampler, sent = sampler_of(model32, autocast="bfloat16")
    sampler.load(0, sent)
    sampler.begin_batch(prompts(), GenerationRequest(1, 2))
    assert sampler.restore_rows([sampler.save_rows(0)], 0, sent) == weight_digests(sent)
    assert len(sampler.finish_batch(1)[0]) == 2 * len(prompts())
    sampler.close()
