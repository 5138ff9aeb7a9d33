"""A HybridActor over an engine with weights of its own: the same tokens, and the new ones after each step."""

import importlib.util

import pytest
import torch
from random_models import save_random_model

from verl.hybrid.actor import HybridActor
from verl.hybrid.benchmark import measure_switch_overhead
from verl.rollout.vllm.config import VLLMRollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm"),
]


@pytest.fixture(scope="module")
def actors(tmp_path_factory):
    """vLLM and our own loop on one model; heads of 32 numbers, since its kernels for the CPU take no smaller ones."""
    path = save_random_model(tmp_path_factory.mktemp("model"), "qwen2", torch.float32, hidden_size=128)
    own = HybridActor.from_pretrained(path, device="cpu")
    rollout = VLLMRollout(max_num_seqs=16, max_num_batched_tokens=64, kv_cache_gib=0.05)
    actor = HybridActor(own.model, own.tokenizer, rollout=rollout)
    yield actor, own
    actor.close()


@pytest.fixture
def encoded(tokenizer):
    return tokenizer(["1+2=", "what is 6*7? "], padding=True, return_tensors="pt")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "asked", [{"max_new_tokens": 5}, {"do_sample": True, "seed": 3, "num_return_sequences": 2, "max_new_tokens": 7}]
)
def test_it_gives_the_tokens_of_our_own_loop_under_any_options_by_one_engine(asked, actors, encoded):
    actor, own = actors
    actor.generate(**encoded, max_new_tokens=2)
    before = actor.rollout_engine.process_id
    assert torch.equal(actor.generate(**encoded, **asked), own.generate(**encoded, **asked))
    assert actor.rollout_engine.process_id == before


@pytest.mark.exhaustive
def test_it_follows_the_weights_and_a_switch_is_measured(actors, encoded):
    actor, own = actors
    asked = {"do_sample": True, "seed": 3, "max_new_tokens": 7}
    first = actor.generate(**encoded, **asked)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    actor.train()(input_ids=encoded["input_ids"], labels=encoded["input_ids"]).loss.backward()
    optimizer.step()
    second = actor.generate(**encoded, **asked)
    assert actor.training
    assert not torch.equal(first, second)
    assert torch.equal(second, own.generate(**encoded, **asked))
    assert measure_switch_overhead(actor, "eval", repeats=2)["latency_ms"] > 0
