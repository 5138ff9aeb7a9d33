"""Decode steps through CUDA graphs: the bits of steps that run kernel by kernel; seconds are reported."""

import functools
import time

import pytest
import torch
from gpu.needs import gpus
from rollout.engines import by_row, generate, random_prompts

from verl.models.tiny import TinyModel
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.utils.seeding import seed_everything

pytestmark = gpus()


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("longest", [40, 300])
def test_responses_are_those_of_single_kernels_bit_by_bit(longest, autocast, record_property, monkeypatch):
    begin = functools.partialmethod(torch.cuda.CUDAGraph.capture_begin, check_input_liveness=True)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)  # replays refuse to read freed memory
    seed_everything(0)
    source = TinyModel(hidden_size=256, intermediate_size=512, num_layers=6, num_heads=4, context_length=1024)
    model = source.load_causal_lm("cuda:0").requires_grad_(False)
    engine = HFRollout(max_new_tokens=200, max_rows=48, sleep=False).attach(model, source.load_tokenizer(), 0, autocast)
    prompts, found, seconds = random_prompts(24, longest), {}, {}
    made = []
    for name in ("first", "warm", "graphs", "kernels"):
        if name == "kernels":
            assert engine.memory is not None
            assert engine.memory.graphs.new_graph is not None, "no graph could be made"
            engine.memory.graphs.new_graph = None
        start = time.perf_counter()
        found[name] = by_row(generate(engine, prompts, GenerationRequest(1, 4)))
        torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - start, 2)
        made.append(torch.cuda.memory_allocated())
    record_property("seconds", seconds)
    for row, (tokens, log_probs) in found["graphs"].items():
        assert tokens == found["kernels"][row][0]
        assert torch.equal(log_probs, found["kernels"][row][1])
    assert found["first"].keys() == found["graphs"].keys()
    assert made[2] == made[1]  # once each shape has come twice nothing more is kept
