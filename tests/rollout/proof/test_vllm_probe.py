"""Real syncs to vLLM: clean ones are proven, and every planted fault is caught and named.

Every sync of tests/rollout/vllm/test_families.py is proven too, for further families.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import has_tests
from random_models import save_random_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm proof"),  # one process runs them all
    pytest.mark.slow,
]

ENGINES = {
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}, "float32", "weights"),
    "qwen3 bfloat16": ("qwen3", {"head_dim": 32}, "bfloat16", "weights"),
    "experts": ("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 64}, "float32", "experts"),
    "adapter": ("qwen2", {}, "float32", "adapter"),
}
WHOLE = ["qwen2 tied", pytest.param("qwen3 bfloat16", marks=pytest.mark.exhaustive)]
ATTENTION, LATE, EXPERTS = "model.layers.0.self_attn", "model.layers.1", "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Engine -> scenario -> what became of it. One that exhaustive tests alone ask about runs with them."""
    arguments, is_exhaustive = {}, has_tests(request, "exhaustive")
    for name, (family, options, dtype, kind) in ENGINES.items():
        if dtype == "bfloat16" and not is_exhaustive:
            continue
        path = tmp_path_factory.mktemp("models") / name.replace(" ", "_")
        save_random_model(path, family, torch.float32, hidden_size=128, intermediate_size=192, **options)
        arguments[name] = f"{path}:{dtype}:{kind}"
    script = Path(__file__).with_name("vllm_scenarios.py")
    done = subprocess.run([sys.executable, script, *arguments.values()], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    return {name: outcomes[argument] for name, argument in arguments.items()}


@pytest.mark.parametrize("engine", WHOLE)
@pytest.mark.parametrize("scenario", ["first", "clean", "last"])
def test_a_clean_sync_is_proven(found, engine, scenario):
    outcome = found[engine][scenario]
    assert outcome["names"] == []
    assert outcome["metrics"]["sync/probe_gap_nats"] < (1e-4 if engine == "qwen2 tied" else 0.05)
    assert outcome["metrics"]["sync/unproven_tensors"] == 0


def test_a_tied_head_that_stays_behind_is_named(found):
    outcome = found["qwen2 tied"]["stale head"]
    assert outcome["names"] == ["lm_head.weight"]
    assert "it is stale: it holds what the sync before brought" in outcome["text"]
    assert "tied to model.embed_tokens.weight" in outcome["text"]


@pytest.mark.parametrize("engine", WHOLE)
def test_swapped_tensors_are_named_with_what_they_hold(found, engine):
    k, v = f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"
    outcome = found[engine]["swapped"]
    assert outcome["names"] == [k, v]
    assert f"it holds what {v} should" in outcome["text"]
    assert f"it holds what {k} should" in outcome["text"]


@pytest.mark.parametrize("engine", WHOLE)
def test_one_stale_tensor_of_the_last_layer_is_named(found, engine):
    assert found[engine]["stale"]["names"] == [f"{LATE}.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("qwen2 tied", "self_attn.q_proj.bias"),
        pytest.param("qwen3 bfloat16", "self_attn.q_norm.weight", marks=pytest.mark.exhaustive),
        ("qwen2 tied", "input_layernorm.weight"),
    ],
)
def test_a_vector_that_stays_behind_is_named(found, engine, name):
    assert found[engine][f"left out {name}"]["names"] == [f"{LATE}.{name}"]


@pytest.mark.parametrize("scenario", ["first", "clean", "last"])
def test_a_clean_sync_of_experts_is_proven_expert_by_expert(found, scenario):
    outcome = found["experts"][scenario]
    assert outcome["names"] == []
    assert outcome["metrics"]["sync/probe_gap_nats"] < 1e-4
    assert outcome["metrics"]["sync/unproven_tensors"] == 0


@pytest.mark.parametrize(
    ("scenario", "named"),
    [
        ("stale", ["2.down_proj"]),
        ("exchanged", ["1.up_proj", "3.up_proj"]),
        ("not packed again", [f"{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]),
    ],
)
def test_an_expert_that_is_not_the_trainers_is_named(found, scenario, named):
    names = found["experts"][scenario]["names"]
    assert sorted(name for name in names if ".layers.1." in name) == sorted(f"{EXPERTS}.{n}.weight" for n in named)
    assert all(".mlp.experts." in name for name in names)
    assert scenario == "not packed again" or len(names) == len(named)


def test_every_packing_of_experts_of_this_machine_can_be_read(found):
    assert found["experts"]["packing"]["names"] == []
    assert "vec" in found["experts"]["packing"]["text"]


@pytest.mark.parametrize("scenario", ["first", "clean", "last"])
def test_a_clean_sync_of_an_adapter_is_proven(found, scenario):
    outcome = found["adapter"][scenario]
    assert outcome["names"] == []
    assert outcome["metrics"]["sync/probe_gap_nats"] < 1e-4


@pytest.mark.parametrize("scenario", ["stale", "not asked for"])
def test_an_adapter_that_is_not_the_trainers_is_caught(found, scenario):
    assert len(found["adapter"][scenario]["names"]) == 2 * 2 * 7  # A and B, two layers, seven products


def test_an_adapter_that_binds_some_layers_only_is_caught(found):
    names = found["adapter"]["binds half"]["names"]
    assert names == [f"model.layers.{i}.self_attn.q_proj.lora_{part}" for i in (0, 1) for part in "AB"]
