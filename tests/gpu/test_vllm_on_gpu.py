"""Tier 2, vLLM on a GPU: weights by CUDA IPC, memory given back while training, several processes over NCCL."""

import dataclasses

import pytest
import torch
from gpu.needs import GIB, gpus, vllm
from rollout.engines import agreement, generate, random_prompts, save_family, shake
from trainer.runs import GRPO_ALGORITHM, JSONL, fit, ppo_run, step_lines

from verl.component import BuildContext
from verl.engines.sharding import FSDP
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout

pytestmark = [*gpus(), vllm()]


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
            *(generate(engine, random_prompts(), GenerationRequest(seed, 4)) for engine in (vllm, ours))
        )
        assert same >= 0.95
        assert gap < 2e-3


def test_three_rounds_of_rest_give_memory_back_although_torch_has_filled_its_cache(engines):
    vllm, _, _ = engines
    before = generate(vllm, random_prompts(), GenerationRequest(0))
    for _ in range(3):
        awake = torch.cuda.mem_get_info()[0]
        vllm.offload()
        assert torch.cuda.mem_get_info()[0] - awake > 2**29
        filler = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(16)]  # as activations do
        del filler
        after = generate(vllm, random_prompts(), GenerationRequest(0))
        assert agreement(before, after)[0] == 1


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 22 * GIB, reason="needs 22 GiB free on the GPU"
)
def test_it_starts_beside_a_trainer_that_holds_15_gib(tmp_path):
    source = save_family(tmp_path / "model", "qwen2_tied")
    model, tokenizer = source.load_causal_lm("cuda:0"), source.load_tokenizer()
    held = torch.empty(15 * GIB, dtype=torch.uint8, device="cuda")
    context = BuildContext(device="cuda:0", run_dir=tmp_path, trainer_bytes=15 * GIB)
    engine = VLLMRollout(max_new_tokens=10, max_num_seqs=16).attach(model, tokenizer, 0, None, context)
    try:
        assert len(generate(engine, random_prompts(), GenerationRequest(0))) == 12
        assert engine.setup.setting.cache_bytes < torch.cuda.mem_get_info()[1] - held.nbytes
    finally:
        engine.close()


@pytest.mark.parametrize(
    "workers",
    [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["an engine each", "one engine over both", "one engine in two stages"],
)
@pytest.mark.usefixtures("two_gpus")
def test_two_processes_over_nccl_train_beside_engines_in_bfloat16(workers, tmp_path):
    source = save_family(tmp_path / "model", "qwen2_tied")
    settings = {"device": "cuda", "n_gpus_per_node": 2, "sharding": FSDP(timeout_s=120.0), "total_steps": 2}
    run = ppo_run(source, GRPO_ALGORITHM, tracker=JSONL, **settings)
    rollout = VLLMRollout(max_new_tokens=7, kv_cache_gib=0.5, max_num_seqs=16, **workers)
    run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, autocast="bfloat16"), rollout=rollout)
    fit(run, tmp_path / "run")
    lines = step_lines(tmp_path / "run")
    assert len(lines) == 2
    assert all(line["sync/probe_gap_nats"] < 0.3 for line in lines)


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices; this machine has {torch.cuda.device_count()}")
