"""An engine of several workers: each takes its part from the same stream, and nothing is left when it ends."""

import os
import re
import signal
from pathlib import Path

import pytest
from rollout.engines import agreement, generate, random_prompts, save_family, shake

from verl.component import BuildContext
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.utils.orphan_cleanup import members

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [("qwen2_tied", 2, 1), ("qwen2_tied", 1, 2), ("qwen2", 1, 2), ("llama", 2, 2), ("qwen3_moe", 1, 2)],
)
def test_several_workers_draw_what_our_own_loop_draws_and_leave_no_shared_memory(family, tensor, pipeline, tmp_path):
    source = save_family(tmp_path / "model", family)
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    options = VLLMRollout(
        max_new_tokens=10,
        kv_cache_gib=0.05,
        max_num_seqs=16,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
    )
    engine = options.attach(model, tokenizer, 0, None, BuildContext(run_dir=tmp_path))
    ours = HFRollout(max_new_tokens=10).attach(model, tokenizer, 0)
    try:
        for seed in range(2):
            shake(model, seed=seed)
            assert engine.sync().metrics["sync/unproven_tensors"] == 0
            request = GenerationRequest(seed, 4)
            same, gap = agreement(*(generate(e, random_prompts(), request) for e in (engine, ours)))
            assert same >= 0.95
            assert gap < 5e-4
    finally:
        engine.close()
    assert [name for name in os.listdir("/dev/shm") if engine.process.files.name in name] == []
    assert not engine.process.files.temporary.exists()


@pytest.mark.parametrize("has_died", [True, False], ids=["died", "killed"])
def test_an_engine_that_does_not_end_by_itself_leaves_neither_workers_nor_their_shared_memory(has_died, tmp_path):
    source = save_family(tmp_path / "model", "qwen2_tied")
    options = VLLMRollout(max_new_tokens=4, kv_cache_gib=0.05, max_num_seqs=16, tensor_parallel_size=2)
    engine = options.attach(
        source.load_causal_lm("cpu"), source.load_tokenizer(), 0, None, BuildContext(run_dir=tmp_path)
    )
    try:
        engine.sync()
        pid = engine.process_id
        running = members(pid)
        maps = "".join(Path(f"/proc/{one}/maps").read_text() for one in running)
        shared = {name for name in re.findall(r"/dev/shm/\S+", maps) if Path(name).exists()}
        assert len(shared) > 2  # queues of Python's, and the memory of collective operations
        assert all(engine.process.files.name in name for name in shared)
        if has_died:
            os.kill(pid, signal.SIGKILL)
        engine.process.kill()
    finally:
        engine.close()
    assert {name for name in shared if Path(name).exists()} == set()
    assert members(pid) == []
