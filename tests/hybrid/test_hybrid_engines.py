"""A HybridActor over engines that are chosen for it, or that stand elsewhere: each call draws as it says."""

from __future__ import annotations

import pytest
import torch
from http_client.servers import serving
from rollout.speaking import Speaker

from verl.hybrid.actor import HybridActor
from verl.rollout.server.config import ServerRollout

TEXTS = ["1+2=", "what is 6*7? "]


@pytest.fixture
def encoded(tokenizer):
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def test_auto_draws_what_the_engine_draws_that_it_takes(dir32, encoded):
    chosen = HybridActor.from_pretrained(dir32, rollout="auto", device="cpu")
    own = HybridActor(chosen.model, chosen.tokenizer)
    for asked in ({"max_new_tokens": 3}, {"max_new_tokens": 6, "do_sample": True, "top_p": 0.9, "seed": 3}):
        assert torch.equal(chosen.generate(**encoded, **asked), own.generate(**encoded, **asked))
    engine = chosen.rollout_engine
    chosen.generate(**encoded, max_new_tokens=2)
    assert chosen.rollout_engine is engine


def test_a_server_is_asked_for_what_each_call_asks_for(dir32, encoded):
    speaker = Speaker(dir32)
    with serving(speaker.post, speaker.page) as server:
        rollout = ServerRollout(endpoint=server.endpoint(), model="the-actor")
        actor = HybridActor.from_pretrained(dir32, rollout=rollout, device="cpu")
        own = HybridActor(actor.model, actor.tokenizer)
        for length in (2, 5, 3):
            greedy = {"max_new_tokens": length, "min_new_tokens": length}
            assert torch.equal(actor.generate(**encoded, **greedy), own.generate(**encoded, **greedy))
        for temperature in (0.5, 2.0):
            actor.generate(**encoded, do_sample=True, temperature=temperature, max_new_tokens=2)
            assert [asked.body["temperature"] for asked in server.asked if "seed" in asked.body][-1] == temperature
        actor.close()
