"""HybridActor on a GPU: a switch in place, and memory that is given back."""

import torch
from gpu.needs import gpus

from verl.hybrid.actor import HybridActor
from verl.hybrid.benchmark import measure_switch_overhead

pytestmark = gpus()


def test_generating_leaves_no_memory_behind_and_a_switch_takes_none(dir32, tokenizer):
    actor = HybridActor.from_pretrained(dir32, auto_cache_clear=True, device="cuda")
    prompts = tokenizer(["1+2=", "what is 6*7? "], padding=True, return_tensors="pt").to("cuda")
    actor.generate(**prompts, max_new_tokens=8)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    out = actor.generate(**prompts, max_new_tokens=8, do_sample=True)
    assert out.device.type == "cuda"
    del out
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved
    assert measure_switch_overhead(actor, "round_trip", repeats=3)["mem_increase_mb"] == 0
    assert measure_switch_overhead(actor, "reload", repeats=2)["mem_increase_mb"] > 0
