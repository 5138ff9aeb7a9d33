"""Any Hugging Face model: what is refused before and while it loads, and what is done to it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from random_models import save_random_model
from refusals import refusal, refused
from roles import experience, largest_difference, start_actor, weights
from safetensors.torch import load_file, save_file
from trainer.runs import fit, ppo_run
from transformers import AutoConfig, AutoModelForCausalLM

from verl.errors import ConfigError
from verl.models.hf_state_dict import hf_state_dict
from verl.models.lora import LoRA
from verl.models.model_files import asks_hub
from verl.models.pretrained import Pretrained
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.weight_sync.state_dict import weights_of


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen2-0.5B", "warm-start://arithmetic"])
def test_a_name_on_the_hub_passes_without_asking_the_hub(path):
    assert Pretrained(path=path).path == path
    assert Pretrained(path=path).max_positions() is None


def copy(dir32, tmp_path, **config):
    """A copy of a model with other entries in its configuration."""
    directory = shutil.copytree(dir32, tmp_path / "copy")
    before = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(before | config))
    return Pretrained(path=str(directory))


def without_weights(dir32, tmp_path):
    made = copy(dir32, tmp_path)
    kept = {n: x for n, x in load_file(f"{made.path}/model.safetensors").items() if "layers.1.mlp" not in n}
    save_file(kept, f"{made.path}/model.safetensors", {"format": "pt"})
    return made


def bare(model32, tmp_path):
    model32.load_backbone("cpu").save_pretrained(tmp_path)
    return Pretrained(path=str(tmp_path))


def gemma(tmp_path):
    save_random_model(tmp_path, "gemma2", torch.float32)
    return Pretrained(path=str(tmp_path))


test_what_is_no_model_or_would_not_be_the_model_is_refused = refused(
    ("path", "notes.txt", lambda tmp_path: [(tmp_path / "notes.txt").touch(), Pretrained(path=str(tmp_path))]),
    ("path", "./absent", lambda: Pretrained(path="./absent")),
    ("tokenizer_path", "./absent", lambda: Pretrained(path="owner/name", tokenizer_path="./absent")),
    ("path", "missing", lambda dir32, tmp_path: without_weights(dir32, tmp_path).load_causal_lm("cpu")),
    ("path", "missing", lambda dir32, tmp_path: without_weights(dir32, tmp_path).load_backbone("cpu")),
    ("path", "shape", lambda dir32, tmp_path: copy(dir32, tmp_path, intermediate_size=48).load_causal_lm("cpu")),
    ("path", "missing", lambda model32, tmp_path: bare(model32, tmp_path).load_causal_lm("cpu")),
    ("path", "damaged", lambda dir32, tmp_path: copy(dir32, tmp_path, num_hidden_layers=-1)),
    ("path", "damaged", lambda dir32, tmp_path: copy(dir32, tmp_path, n_layer=-2)),
    ("path", "damaged", lambda dir32, tmp_path: copy(dir32, tmp_path, text_config={"vocab_size": -5})),
    ("attention", "sdpa", lambda tmp_path: gemma(tmp_path).load_causal_lm("cpu")),  # it leaves out a part of the model
    ("attention", "sdpa", lambda tmp_path: gemma(tmp_path).load_backbone("cpu")),
    ("model.dtype", "bfloat16", lambda dir32: start_actor(Pretrained(path=str(dir32), dtype="bfloat16"))),
)


def test_the_context_length_is_read_without_the_weights(dir32, tmp_path):
    shutil.copy(dir32 / "config.json", tmp_path)
    assert Pretrained(path=str(tmp_path)).max_positions() == 64


def test_a_tokenizer_without_padding_pads_with_its_end_of_text_on_the_left(dir64, tmp_path):
    directory = shutil.copytree(dir64, tmp_path / "unpadded")
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("pad_token")
    for added in ({}, {"pad_token": "<added>"}):  # which has no embedding
        file.write_text(json.dumps(settings | {"padding_side": "right"} | added))
        tokenizer = Pretrained(path=str(directory)).load_tokenizer()
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
        assert tokenizer.padding_side == "left"


def test_generation_settings_that_transformers_does_not_save_do_not_end_a_run(dir32, tmp_path):
    directory = copy(dir32, tmp_path).path
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}
    (Path(directory) / "generation_config.json").write_text(json.dumps(settings))
    source = Pretrained(path=directory)
    for model in (source.load_causal_lm("cpu"), source.load_skeleton("causal_lm")):
        assert model.generation_config.eos_token_id == [1, 2]
        model.generation_config.save_pretrained(tmp_path)


def test_tokens_of_the_data_that_the_model_was_not_resized_for_are_refused(tmp_path):
    path = save_random_model(tmp_path / "m", "llama", torch.float32, vocab_size=12)
    with refusal("actor.model", value=12):
        fit(ppo_run(Pretrained(path=str(path))), tmp_path)


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("gpt_neox", {"attention_dropout": 0.5, "hidden_dropout": 0.5}),
        ("starcoder2", {"attention_dropout": 0.5, "residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("mixtral", {"router_jitter_noise": 0.5, "num_key_value_heads": 2}),
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ],
)
def test_dropout_is_off_in_training_too(family, rates, tmp_path):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **special, **rates)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = Pretrained(path=str(tmp_path)).load_causal_lm("cpu")
    tokens = torch.randint(3, 50, (2, 9))
    still = model(tokens).logits
    assert torch.equal(model.train()(tokens).logits, still)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == model.config.to_dict() | {"dtype": "float32"}


def test_attention_that_a_family_lacks_is_refused_with_the_way_out(tmp_path, prompts):
    save_random_model(tmp_path, "gptj", torch.float32)
    with refusal("attention", varies=True):
        Pretrained(path=str(tmp_path)).load_causal_lm("cpu")
    rows = start_actor(Pretrained(path=str(tmp_path), attention="eager")).generate(prompts(), GenerationRequest(0, 2))
    assert len(rows) == 8


def test_a_bfloat16_model_generates_and_trains_an_adapter_with_float32_numbers(dir32, prompts):
    actor = start_actor(Pretrained(path=str(dir32), dtype="bfloat16"), HFRollout(max_new_tokens=6), lora=LoRA(rank=2))
    rows = experience(actor, prompts())
    assert actor.model.dtype == torch.bfloat16
    assert rows["rollout_log_probs"].dtype == rows["old_log_probs"].dtype == torch.float32
    assert (rows["rollout_log_probs"] - rows["old_log_probs"]).abs().max() < 0.2
    assert actor.update(rows)["grad_norm"] > 0


def test_autocast_computes_in_bfloat16_and_keeps_weights_in_float32(dir32, prompts):
    source = Pretrained(path=str(dir32))
    exact = start_actor(source, HFRollout(max_new_tokens=6))
    cast = start_actor(source, HFRollout(max_new_tokens=6), autocast="bfloat16")
    rows = experience(exact, prompts())
    gap = (cast.compute_log_probs(rows)["old_log_probs"] - rows["old_log_probs"]).abs().max()
    assert 0 < gap < 0.1
    before = weights(cast.model)
    assert cast.update(rows)["grad_norm"] > 0
    assert {weight.dtype for weight in cast.model.parameters()} == {torch.float32}
    assert largest_difference(before, weights(cast.model)) > 0
    drawn = cast.generate(prompts(), GenerationRequest(0, 4))
    own = cast.compute_log_probs(drawn)["old_log_probs"]
    assert (drawn["rollout_log_probs"] - own).abs().max() < 0.1


ODD_CONFIGURATIONS = [
    ("config.json", "[]"),
    ("config.json", "{"),
    pytest.param("config.json", "[" * 5000, id="nested"),
    ("config.json", {"model_type": 5}),
    ("config.json", {"model_type": "absent"}),
    ("config.json", {"hidden_size": 0}),
    ("config.json", {"num_attention_heads": 0}),
    ("config.json", {"num_hidden_layers": "x"}),
    ("config.json", {"rope_scaling": 3, "rope_parameters": 3}),
    ("config.json", {"vocab_size": None}),
    ("config.json", {"architectures": 3}),
    ("config.json", {"layer_types": "x"}),
    ("config.json", {"torch_dtype": "evil", "dtype": "evil"}),
    ("config.json", {"vocab_size": 2**40}),
    ("config.json", {"quantization_config": "x"}),
    ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ("config.json", {"num_key_value_heads": -2}),
    ("config.json", {"_attn_implementation": "evil/kernel"}),
    ("tokenizer.json", "[]"),
    ("tokenizer.json", {"model": 3}),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", {"eos_token": {"a": 1}}),
    ("adapter_config.json", "[]"),
    ("adapter_config.json", {"base_model_name_or_path": 5}),
    ("adapter_config.json", {"base_model_name_or_path": "BASE", "peft_type": "runtime/eva"}),
    ("adapter_config.json", {"base_model_name_or_path": "BASE", "peft_type": "LORA", "r": "x"}),
    ("adapter_config.json", {"base_model_name_or_path": "BASE", "peft_type": "PROMPT_TUNING"}),
]


@pytest.mark.parametrize(("file", "value"), ODD_CONFIGURATIONS)
def test_odd_values_in_the_files_of_a_model_are_told_by_its_path(file, value, dir32, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(dir32, directory)
    if isinstance(value, dict):
        before = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
        value = json.dumps({**before, **value}).replace("BASE", str(dir32))
    (directory / file).write_text(value)
    said = str(directory)
    try:
        described = Pretrained(path=str(directory))
        described.load_tokenizer()
        for found in (described.max_positions(), described.attention_heads(), described.layer_count()):
            assert found is None or found
        described.load_causal_lm("cpu")
    except ConfigError as error:
        said = str(error)
    assert str(directory) in said
    assert len(said) < 1500


def test_weights_of_eight_bits_are_trained_as_what_they_stand_for_and_others_are_named(dir32, tmp_path, caplog):
    directory = tmp_path / "model"
    shutil.copytree(dir32, directory)
    tensors, expected = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if "mlp" in name]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        expected[name] = tensors[name].float() * scale
        tensors[f"{name}_scale_inv"] = scale.repeat(*(-(-size // 128) for size in tensors[name].shape))
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    model = Pretrained(path=str(directory)).load_causal_lm("cpu")
    sent = {weight.name: weight.make() for weight in weights_of(model)}
    assert sent.keys() == hf_state_dict(model).tensors.keys() == load_file(dir32 / "model.safetensors").keys()
    assert all(torch.equal(sent[name], weight) for name, weight in expected.items())
    assert [record.args[1:] for record in caplog.records if record.name == "verl.models.pretrained"] == [
        (1, "Qwen2ForCausalLM", "model.layers.7.mlp.up_proj.weight")
    ]


class Evil:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("inside", [True, False])
def test_weights_that_would_run_code_are_refused_by_their_path_and_run_none(inside, dir32, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(dir32, directory)
    (directory / "model.safetensors").unlink()
    evil = Evil(tmp_path / "ran")
    torch.save({"weight": evil} if inside else evil, directory / "pytorch_model.bin")
    with refusal("path", value=directory, varies=True):
        Pretrained(path=str(directory)).load_causal_lm("cpu")
    assert not evil.file.exists()


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_without_the_hub_a_name_that_is_not_in_the_cache_is_told_at_once(is_asked_for, monkeypatch):
    asks_hub.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_asked_for)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with refusal("path", value="absent/model"):
        Pretrained(path="absent/model").load_tokenizer()
