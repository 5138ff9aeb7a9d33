"""Training sessions that sample by vLLM: its process gets the adapter that is asked for, and samples as `hf` does."""

from __future__ import annotations

import importlib.util

import pytest
from rollout.engines import save_family

from verl import TrainingSession
from verl.rollout.vllm.config import VLLMRollout
from verl.service.data import Datum

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SMALL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_gib": 0.05,
    "max_model_len": 32,
    "max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """A session that samples with the tensors that train, and one by vLLM."""
    model = save_family(tmp_path_factory.mktemp("model"), "qwen2_tied")
    options = {"rank": 4, "seed": 1, "device": "cpu"}
    vllm = TrainingSession(model, **options, rollout=VLLMRollout(**SMALL))
    with TrainingSession(model, **options) as hf, vllm:
        yield hf, vllm


def trained(session: TrainingSession, text: str) -> TrainingSession:
    ids = session.tokenizer(text, add_special_tokens=False)["input_ids"]
    session.forward_backward([Datum(ids[:-1], {"target_tokens": ids[1:]})])
    session.optim_step(lr=0.05)
    return session


def drawn(session: TrainingSession, **options) -> list[list[int]]:
    prompts = [session.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1+2=", "34+5=", "9-")]
    options = {"num_samples": 2, "seed": 3, "max_new_tokens": 6} | options
    return [one.tokens for samples in session.sample(prompts, **options) for one in samples]


def test_each_adapter_is_sampled_from_with_its_present_weights(sessions):
    found = []
    for session in sessions:
        first = drawn(session)
        other = session.another(rank=2, seed=5)
        changed = drawn(trained(session, "1+2=3")), drawn(trained(other, "9-9=0")), drawn(session), drawn(other)
        again = drawn(trained(session, "34+5=39"))
        other.close()
        found.append((first, *changed, again))
    hf, vllm = found
    assert vllm == hf
    assert len({str(x) for x in vllm}) == 4  # before, and after each of three updates


def test_a_stop_text_ends_a_response(sessions):
    found = [drawn(session, stop=("1", "2"), max_new_tokens=20, temperature=1.5) for session in sessions]
    assert found[0] == found[1]
    assert any(len(tokens) < 20 for tokens in found[1])
