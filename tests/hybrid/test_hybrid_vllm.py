"""A HybridActor over an engine with weights of its own: the same tokens, and the new ones after each step."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from random_models import save_random_model

from verl.errors import WeightSyncError
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
    assert measure_switch_overhead(actor, "train_to_generate", repeats=2)["latency_ms"] > 0


@pytest.mark.exhaustive
def test_it_draws_from_the_model_that_it_has_and_none_that_it_cannot_follow(actors, encoded):
    """A model in the place of another by a new engine; weights, dropout and adapters within it by the same one."""
    actor, own = actors
    asked = {"do_sample": True, "seed": 3, "max_new_tokens": 7}
    before = actor.model
    actor.generate(**encoded, **asked)
    torch.manual_seed(7)
    actor.model = other = type(before)(copy.deepcopy(before.config))
    ours = HybridActor(other, own.tokenizer)
    assert torch.equal(actor.generate(**encoded, **asked), ours.generate(**encoded, **asked))
    engine = actor.rollout_engine.process_id
    other.lm_head.weight = torch.nn.Parameter(torch.randn_like(other.lm_head.weight) * 0.05)
    other.train()
    for layer in other.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert actor.sync().metrics["sync/probe_gap_nats"] < 1e-3
    assert torch.equal(actor.generate(**encoded, **asked), ours.generate(**encoded, **asked))
    assert actor.rollout_engine.process_id == engine
    hook = other.model.norm.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(WeightSyncError, match="computes other log-probs"):
        actor.generate(**encoded, **asked)
    hook.remove()
    assert torch.equal(actor.generate(**encoded, **asked), ours.generate(**encoded, **asked))
    assert actor.rollout_engine.process_id == engine
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5.0}
    actor.model = other
    with pytest.raises(WeightSyncError, match="computes other log-probs"):
        actor.generate(**encoded, **asked)
    actor.model = before


@pytest.mark.exhaustive
def test_an_adapter_is_followed_when_switched_and_merged(actors, encoded):
    actor, own = actors
    asked = {"do_sample": True, "seed": 3, "max_new_tokens": 7}
    before = actor.model
    actor.model = adapted = get_peft_model(copy.deepcopy(before), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    drawn = []
    for switch in (
        adapted.enable_adapter_layers, adapted.disable_adapter_layers, adapted.enable_adapter_layers,
        adapted.merge_adapter, adapted.unmerge_adapter,
    ):  # fmt: skip
        switch()
        drawn.append(actor.generate(**encoded, **asked))
        assert torch.equal(drawn[-1], HybridActor(adapted, own.tokenizer).generate(**encoded, **asked))
    assert not torch.equal(drawn[0], drawn[1])
    actor.model = adapted.merge_and_unload()
    assert torch.equal(actor.generate(**encoded, **asked), drawn[0])
    actor.model.resize_token_embeddings(160)
    assert torch.equal(
        actor.generate(**encoded, **asked), HybridActor(actor.model, own.tokenizer).generate(**encoded, **asked)
    )
    for parameter in actor.model.parameters():
        parameter.data = parameter.data.bfloat16()
    actor.generate(**encoded, **asked)
    assert actor.rollout_engine.setup.dtype == torch.bfloat16
    actor.model = before


@pytest.mark.exhaustive
def test_frozen_weights_that_are_changed_below_an_adapter_reach_an_engine_that_is_sent_the_adapter(actors, encoded):
    own = actors[1]
    adapted = get_peft_model(copy.deepcopy(own.model), LoraConfig(r=8, target_modules="all-linear"))
    rollout = replace(actors[0].rollout, lora="adapter")
    asked = {"do_sample": True, "seed": 3, "max_new_tokens": 7}
    with contextlib.closing(HybridActor(adapted, own.tokenizer, rollout=rollout)) as actor:
        actor.generate(**encoded, **asked)
        adapted.get_base_model().model.norm.weight.data.mul_(1.7)
        assert torch.equal(
            actor.generate(**encoded, **asked), HybridActor(adapted, own.tokenizer).generate(**encoded, **asked)
        )
