"""Which models tensor parallelism divides, and how it says so where it cannot."""

import pytest
import torch
from random_models import save_random_model
from refusals import refusal

from verl.engines.tensor_parallel import plan_of, refuse_unfit
from verl.errors import ConfigError
from verl.models.pretrained import Pretrained


def model_of(family: str, directory, **options):
    path = save_random_model(directory / family, family, torch.float32, **options)
    return Pretrained(path=str(path), attention="eager").load_causal_lm("cpu")


def test_a_model_without_a_plan_is_refused_by_name(tmp_path):
    with refusal("model"):
        refuse_unfit(model_of("opt", tmp_path), 2)


def test_a_plan_with_packed_layers_is_refused_by_their_kind(tmp_path):
    model = model_of("qwen2", tmp_path)
    model._tp_plan["model.layers.*.mlp.gate_up_proj"] = "packed_colwise"
    with pytest.raises(ConfigError, match="layers of kind packed_colwise.*Set sharding=fsdp"):
        refuse_unfit(model, 2)


def test_heads_and_widths_that_do_not_divide_are_refused(tmp_path):
    model = model_of("qwen2", tmp_path, intermediate_size=65)
    with pytest.raises(ConfigError, match=r"is 4: it must divide the model's 2 key-value heads.*Set it to 1 or 2\."):
        refuse_unfit(model, 4)
    with pytest.raises(ConfigError, match="is 2: it does not divide intermediate_size 65"):
        refuse_unfit(model, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_leaves_head_and_embedding_whole(tied, tmp_path):
    model = model_of("qwen2", tmp_path, vocab_size=103, tie_word_embeddings=tied)
    assert not {"lm_head", "model.embed_tokens"} & set(plan_of(model, 2))
    assert plan_of(model_of("llama", tmp_path), 2)["lm_head"] == "colwise_gather_output"
    assert "model.layers.*.self_attn.q_proj" in plan_of(model, 2)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_experts_are_divided_one_by_one(family, tmp_path):
    model = model_of(family, tmp_path)
    refuse_unfit(model, 2)
    experts = {name: style for name, style in plan_of(model, 2).items() if "experts" in name or "gate" in name}
    assert {
        name.removeprefix("model.layers.*.mlp."): style for name, style in experts.items() if "_proj" not in name
    } == {"experts": "moe_tp_experts", "gate": "ep_router"}
    assert experts["model.layers.*.mlp.experts.gate_up_proj"] == "grouped_gemm"


def test_experts_that_do_not_divide_stay_whole(tmp_path):
    model = model_of("qwen3_moe", tmp_path, num_experts=3)
    refuse_unfit(model, 2)
    assert not any("experts" in name or name.endswith("gate") for name in plan_of(model, 2))
