"""vLLM on a GPU: weights by CUDA IPC, memory back while training; skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from rollout.engines import agreement, random_prompts, save_family, shake

from verl.component import BuildContext
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.fixture
def engines(tmp_path):
    source = save_family(tmp_path / "model", "qwen2_tied")
    model, tokenizer = source.load_causal_lm("cuda:0"), source.load_tokenizer()
    context = BuildContext(device="cuda:0", run_dir=tmp_path)
    vllm = VLLMRollout(max_new_tokens=10, kv_cache_gib=1.0).attach(model, tokenizer, 0, None, context)
    yield vllm, HFRollout(max_new_tokens=10).attach(model, tokenizer, 0), model
    vllm.close()


def test_it_draws_what_our_own_loop_draws_and_follows_the_weights(engines):
    vllm, ours, model = engines
    for seed in range(2):
        shake(model.cpu(), seed=seed)
        model.to("cuda:0")
        vllm.sync()
        same, gap = agreement(
            *(engine.generate(random_prompts(), GenerationRequest(seed, 4)) for engine in (vllm, ours))
        )
        assert same >= 0.95
        assert gap < 2e-3


def test_resting_gives_memory_back_and_the_next_call_takes_it_again(engines):
    vllm, _, _ = engines
    before = vllm.generate(random_prompts(), GenerationRequest(0))
    awake = torch.cuda.mem_get_info()[0]
    vllm.rest()
    assert torch.cuda.mem_get_info()[0] - awake > 2**29
    after = vllm.generate(random_prompts(), GenerationRequest(0))
    assert agreement(before, after)[0] == 1
