"""Router replay with vLLM: the experts that its routers chose for each sampled token reach the trainer."""

import dataclasses
import re

import pytest
import torch
from refusals import refusal
from rollout.engines import generate, random_prompts, save_family
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.engines.sharding import FSDP, NoSharding
from verl.model_paths.expert_routing import UNKNOWN
from verl.models.lora import LoRA
from verl.rollout.base import GenerationRequest
from verl.rollout.engine_process.process import EngineError
from verl.rollout.hf import HFRollout
from verl.rollout.vllm import engine_args
from verl.rollout.vllm.config import VLLMRollout

pytestmark = pytest.mark.xdist_group("vllm")
SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05, "num_threads": 1}  # prompts in pieces


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_experts_of_each_token_are_those_of_our_own_loop(tensor, tmp_path):
    source = save_family(tmp_path / "model", "qwen3_moe")
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    options = VLLMRollout(max_new_tokens=10, router_replay=True, tensor_parallel_size=tensor, **SMALL)
    vllm = options.attach(model, tokenizer, 0, None, BuildContext(run_dir=tmp_path))
    ours = HFRollout(max_new_tokens=10, router_replay=True).attach(model, tokenizer, 0)
    try:
        vllm.sync()
        for request in (GenerationRequest(1, 4), GenerationRequest(2, 4)):  # prompts of the second are in the cache
            found, expected = (generate(engine, random_prompts(), request) for engine in (vllm, ours))
            mask = found["response_mask"]
            assert found["routed_experts"].shape == (*mask.shape, 2, 2)
            assert ((found["routed_experts"] != UNKNOWN).flatten(2).all(dim=2) == mask).all()
            same = (found["responses"] == expected["responses"]).all(dim=1)
            assert same.float().mean() >= 0.95
            left, right = (rows["routed_experts"][same].sort(dim=-1).values for rows in (found, expected))
            assert (left == right).float().mean() > 0.999  # rounding may turn a choice
            assert len(left.flatten(0, -2).unique(dim=0)) > 3
        empty = generate(vllm, random_prompts()[:0], GenerationRequest(1, 4))
        assert empty["routed_experts"].shape[2:] == (2, 2)
    finally:
        vllm.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sharding", "autocast", "lora"),
    [
        (NoSharding(), None, None),
        (NoSharding(), "bfloat16", None),
        (FSDP(), None, None),
        (NoSharding(), None, LoRA(rank=4, target_modules=("q_proj", "v_proj"))),
    ],
    ids=["float32", "bfloat16", "fsdp", "lora"],
)
def test_a_step_replays_what_the_engine_recorded_and_tells_both_gaps(sharding, autocast, lora, tmp_path):
    algorithm = dataclasses.replace(GRPO_ALGORITHM, mini_batches=1)
    run = ppo_run(
        save_family(tmp_path / "model", "qwen3_moe"),
        algorithm,
        rollout=VLLMRollout(max_new_tokens=8, router_replay=True, **SMALL),
        prompts_per_step=8,
        sharding=sharding,
        n_gpus_per_node=2 if isinstance(sharding, FSDP) else 1,
    )
    run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, autocast=autocast, lora=lora))
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        metrics = trainer.step(trainer.train_data.collate(trainer.sampler.next_batch()), 1)
    gap, without = (metrics[f"rollout/log_prob_gap{how}_nats"] for how in ("", "_without_replay"))
    assert gap < (1e-5 if autocast is None else 0.03)
    assert gap <= without * 1.5 + 1e-7


@pytest.mark.parametrize("options", [{"enforce_eager": False}, {"pipeline_parallel_size": 2}])
def test_what_tells_no_experts_is_refused(options):
    with refusal("router_replay"):
        VLLMRollout(router_replay=True, **options)
    assert VLLMRollout(router_replay=True).runs_eager(is_on_gpu=True)


def test_a_kernel_that_does_not_tell_what_it_chose_is_named():
    trace = "ValueError: Routed-experts capture is not supported with monolithic MoE kernel FusedThing."
    setting = engine_args.EngineArgs(VLLMRollout(router_replay=True), "", torch.float32, 1, is_on_gpu=True)
    found = engine_args.as_config_error(
        EngineError("the engine could not be made", trace), setting, torch.nn.Linear(1, 1)
    )
    assert re.search(r"^rollout.router_replay is true: .*FusedThing\. Set it to false", str(found))
