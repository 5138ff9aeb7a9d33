"""An engine of two workers: each takes its shards from the same stream, and nothing is left when it ends."""

from __future__ import annotations

import os

import pytest
from rollout.engines import agreement, random_prompts, save_family, shake

from verl.description import BuildContext
from verl.rollout.base import Request
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.options import VLLMRollout

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.exhaustive]


def test_two_workers_draw_what_our_own_loop_draws_and_leave_no_shared_memory(tmp_path):
    source = save_family(tmp_path / "model", "qwen2_tied")
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    options = VLLMRollout(max_new_tokens=10, kv_cache_gib=0.05, max_num_seqs=16, tensor_parallel_size=2)
    engine = options.attach(model, tokenizer, 0, None, BuildContext(run_dir=tmp_path))
    ours = HFRollout(max_new_tokens=10).attach(model, tokenizer, 0)
    try:
        for seed in range(2):
            shake(model, seed=seed)
            engine.sync()
            same, gap = agreement(*(e.generate(random_prompts(), Request(seed, 4)) for e in (engine, ours)))
            assert same >= 0.95
            assert gap < 5e-4
    finally:
        engine.close()
    log = (tmp_path / "workers/vllm_0.log").read_text()
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("vllm_dist_") and name[:42] in log]
    assert shared == []
