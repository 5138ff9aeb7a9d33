"""A model made without weights and filled slice by slice is the one that is loaded whole."""

import json

import pytest
import torch
from random_models import save_random_model
from safetensors.torch import save_file

from verl.engines.fsdp import load_own_slices
from verl.models.model_files import SafetensorsReader
from verl.models.pretrained import Pretrained

CPU, IDS = torch.device("cpu"), torch.tensor([[3, 5, 7]])
FAMILIES = ["starcoder2", "qwen2", "llama", "gemma2", "gemma3_text", "qwen3", "opt", "gptj"]


def everything(model) -> dict[str, torch.Tensor]:
    """Weights and buffers, those included that no file holds."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def sliced(source, part="causal_lm"):
    """A model whose weights are read slice by slice."""
    model = source.load_skeleton(part)
    assert all(p.is_meta for p in model.parameters())
    load_own_slices(model, model.weight_files, CPU, CPU)
    return model


def both(source):
    """A model that is loaded whole, and in slices."""
    return source.load_causal_lm("cpu"), sliced(source)


def differing(whole, model) -> list[str]:
    found = everything(model)
    return [n for n, x in everything(whole).items() if not torch.equal(x, found[n]) or x.dtype != found[n].dtype]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_make_the_model_that_is_loaded_whole(family, tied, tmp_path):
    path = save_random_model(tmp_path / "m", family, torch.float32, tie_word_embeddings=tied)
    source = Pretrained(path=str(path), attention="eager" if family in ("gemma2", "gptj") else "sdpa")
    whole, model = both(source)
    assert everything(whole).keys() == everything(model).keys()
    assert not differing(whole, model)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    assert torch.equal(model(input_ids=IDS).logits, whole(input_ids=IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["gptj", "codegen", "llama", "gemma3_text", "trocr", "xglm"])
def test_what_no_file_holds_is_computed_in_the_type_of_from_pretrained(family, dtype, tmp_path):
    """Tables of positions in bfloat16 move every token by 0.03 nats."""
    path = save_random_model(tmp_path / "m", family, dtype)
    source = Pretrained(path=str(path), attention="eager", dtype=str(dtype).removeprefix("torch."))
    assert not differing(*both(source))


def test_tensors_that_are_plain_attributes_have_data(tmp_path):
    options = {"use_learned_position_embeddings": False, "decoder_layers": 1, "d_model": 32, "decoder_ffn_dim": 32}
    path = save_random_model(tmp_path / "m", "trocr", torch.float32, **options, decoder_attention_heads=4)
    wanted, found = (model(input_ids=IDS).logits for model in both(Pretrained(path=str(path), attention="eager")))
    assert torch.isfinite(wanted).all()
    assert torch.equal(found, wanted)


def test_a_backbone_is_read_from_the_directory_of_its_language_model(model32):
    assert not differing(model32.load_backbone("cpu"), sliced(model32, "backbone"))


def test_experts_whose_names_transformers_converts_are_loaded_whole(tmp_path):
    path = save_random_model(tmp_path / "m", "qwen3_moe", torch.float32)
    assert Pretrained(path=str(path)).load_skeleton("causal_lm") is None


def test_weights_that_are_absent_or_of_another_shape_are_left_to_the_loading_that_names_them(dir32, tmp_path):
    tensor = torch.zeros(3, 4)
    save_file({"model.a.weight": tensor}, tmp_path / "model.safetensors")
    files = SafetensorsReader(tmp_path, "model")
    assert files.holds({"a.weight": tensor})
    assert files.holds({"model.a.weight": tensor})
    assert not files.holds({"model.a.weight": tensor.T})
    assert not files.holds({"model.b.weight": tensor})


def test_a_slice_is_read_from_the_shard_that_has_it(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    save_file({"x": x}, tmp_path / "a.safetensors")
    save_file({"scalar": torch.tensor(2.0)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "scalar": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = SafetensorsReader(tmp_path)
    assert files.read("x", ((1, 3), (0, 2))).tolist() == [[4.0, 5.0], [8.0, 9.0]]
    assert float(files.read("scalar", ())) == 2.0


def test_a_model_of_the_hub_is_read_in_slices_from_the_cache_of_this_machine(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123abc"
    save_random_model(snapshot, "qwen2", torch.float32)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not differing(Pretrained(path=str(snapshot)).load_causal_lm("cpu"), sliced(Pretrained(path="some/model")))
    assert Pretrained(path="some/other").load_skeleton("causal_lm") is None
