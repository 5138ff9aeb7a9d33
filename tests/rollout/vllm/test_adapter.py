"""An adapter goes to vLLM as itself, under a new number each time."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cluster.processes_of import is_running, wait_until_gone
from rollout.engines import agreement, generate, random_prompts, save_family, shake
from same_training import course, run_course

from verl.component import BuildContext
from verl.engines.sharding import FSDP, TP, TPFSDP, NoSharding, Parallel
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine_args import unmerged_rank
from verl.tracking.base import Trackers

pytestmark = pytest.mark.xdist_group("vllm")


@pytest.mark.exhaustive
def test_adapters_follow_one_another_and_closing_leaves_no_file_and_no_process(tmp_path):
    source = save_family(tmp_path / "model", "qwen2")
    model, tokenizer = (
        LoRA(rank=4).apply(source.load_causal_lm("cpu"), causal_lm=True).eval(),
        source.load_tokenizer(),
    )
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


ROWS = [[0, 1, 2], [3, 4]]
SHARDINGS = {"fsdp": (2, FSDP()), "tp": (2, TP()), "pp": (2, Parallel(pp=2)), "tp fsdp": (4, TPFSDP(tensor_parallel=2))}


def sharded(model, lora, name=None, adapter=LoRA(rank=8), **parts):  # noqa: B008 - frozen
    rollout = VLLMRollout(max_new_tokens=7, kv_cache_gib=0.05, max_num_seqs=16, num_threads=1, lora=lora)
    count, sharding = (1, NoSharding()) if name is None else SHARDINGS[name]
    run = course(model, rollout=rollout, sharding=sharding, n_gpus_per_node=count, **parts)
    return replace(run, actor=replace(run.actor, lora=adapter))


def same_course(found, expected):
    assert found.texts == expected.texts
    for step, line in found.metrics.items():
        for key in ("actor/loss", "actor/grad_norm"):
            assert line[key] == pytest.approx(expected.metrics[step][key], rel=2e-5, abs=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHARDINGS)
def test_the_adapter_of_a_sharded_actor_draws_what_that_of_one_process_does(name, tmp_path):
    model = save_family(tmp_path / "model", "qwen2")
    runs = {"alone": ("adapter", None), "merged": ("merged", name), "adapter": ("adapter", name)}
    found = {}
    for kind, parts in runs.items():
        run = sharded(model, *parts, directory=tmp_path / kind, tracker=Trackers())
        found[kind] = run_course(replace(run, checkpoint=None), ROWS, tmp_path / kind / "run")
    for other in ("alone", "merged"):
        same_course(found["adapter"], found[other])
    size = {kind: [line["sync/bytes"] for line in x.metrics.values()] for kind, x in found.items()}
    assert size["adapter"] == size["alone"]
    assert max(size["adapter"]) < min(size["merged"]) / 5


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_layer_that_vllm_takes_none_of_is_refused_before_it_starts(layer, tmp_path):
    source = save_family(tmp_path / "model", "qwen2")
    model = LoRA(rank=4, target_modules=(layer,)).apply(source.load_causal_lm("cpu"), causal_lm=True)
    with pytest.raises(ConfigError, match=r"rollout\.lora=merged"):
        VLLMRollout(lora="adapter").attach(model, source.load_tokenizer(), 0)


@pytest.mark.parametrize(
    ("family", "lora", "dtype", "layers", "rank"),
    [
        ("qwen2", "auto", torch.bfloat16, "q_proj", 4),  # merged, most of a small update would be rounded away
        ("qwen2", "auto", torch.float32, "q_proj", None),
        ("qwen2", "auto", torch.bfloat16, "lm_head", None),  # vLLM takes no adapter there
        ("qwen3_moe", "auto", torch.bfloat16, "q_proj", None),  # nor beside experts
        ("qwen2", "merged", torch.bfloat16, "q_proj", None),
        ("qwen2", "adapter", torch.float32, "q_proj", 4),
    ],
)
def test_an_adapter_is_merged_where_nothing_is_lost_or_there_is_no_other_way(
    family, lora, dtype, layers, rank, tmp_path
):
    model = save_family(tmp_path / "model", family).load_causal_lm("cpu")
    adapted = LoRA(rank=4, target_modules=(layers,)).apply(model, causal_lm=True)
    assert unmerged_rank(VLLMRollout(lora=lora), adapted, dtype) == rank
    assert unmerged_rank(VLLMRollout(lora=lora), model.base_model, dtype) is None
