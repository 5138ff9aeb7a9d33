"""An adapter goes to vLLM as itself, under a new number each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.processes_of import is_running, wait_until_gone
from rollout.engines import agreement, generate, random_prompts, save_family, shake

from verl.component import BuildContext
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout

pytestmark = pytest.mark.xdist_group("vllm")


def adapted(directory, rank):
    source = save_family(directory / "model", "qwen2")
    return LoRA(rank=rank).apply(source.load_causal_lm("cpu"), causal_lm=True).eval(), source.load_tokenizer()


@pytest.mark.exhaustive
def test_adapters_follow_one_another_and_closing_leaves_no_file_and_no_process(tmp_path):
    model, tokenizer = adapted(tmp_path, rank=4)
    options = VLLMRollout(max_new_tokens=10, kv_cache_gib=0.05, max_num_seqs=16, lora="adapter")
    engine = options.attach(model, tokenizer, 0, None, BuildContext(run_dir=tmp_path))
    ours = HFRollout(max_new_tokens=10).attach(model, tokenizer, 0)
    try:
        for seed in range(3):
            shake(model, 0.1, seed)
            synced = engine.sync()
            same, gap = agreement(*(generate(e, random_prompts(), GenerationRequest(seed, 4)) for e in (engine, ours)))
            assert same >= 0.95
            assert gap < 5e-4
            assert synced.note.startswith(f"adapter {seed + 1}, ")
            assert list(engine.process.files.directory.glob("adapter*")) == []
    finally:
        closing_leaves_nothing(engine, tmp_path / "workers/vllm_0.log")


def closing_leaves_nothing(engine, log):
    """No process and no file; and it can be done twice."""
    process, directory, temporary = engine.process_id, engine.process.files.directory, engine.process.files.temporary
    assert is_running(process)
    assert directory.is_dir()
    assert temporary.is_dir()
    engine.close()
    engine.close()
    assert wait_until_gone([process]) == []
    assert not directory.exists()
    assert not temporary.exists()
    assert list(Path("/dev/shm").glob(f"*{directory.name}*")) == []
    assert "KV cache size" in log.read_text()


def test_a_rank_that_vllm_has_no_room_for_is_refused_before_it_starts(tmp_path):
    model, tokenizer = adapted(tmp_path, rank=600)
    with pytest.raises(ConfigError, match="actor.lora.rank is 600: .* at most rank 512. Set rollout.lora=merged"):
        VLLMRollout(lora="adapter").attach(model, tokenizer, 0)
