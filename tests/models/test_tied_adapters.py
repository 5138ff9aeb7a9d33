"""Adapters on embeddings and head: trained = merged = reloaded = sent to an engine, for tied and untied models."""

import itertools
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from refusals import refusal
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rollout.weight_sync.state_dict import weights_of

IDS = torch.arange(12).view(2, 6)
TARGETS = [
    ["q_proj"],
    ["embed_tokens"],
    ["lm_head"],
    ["embed_tokens", "lm_head"],
    ["embed_tokens", "q_proj"],
    "all-linear",
]


def base(directory, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def trained(model):
    """The model with an adapter that changes it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


SETS = [(x, ()) for x in TARGETS] + [
    (["q_proj"], x) for x in (("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "chosen"), list(itertools.product([True, False], SETS)))
def test_an_adapter_of_peft_is_merged_reloaded_and_exported_as_it_was_trained(tied, chosen, tmp_path):
    path = base(tmp_path / "base", tied)
    config = LoraConfig(r=2, target_modules=chosen[0], modules_to_save=list(chosen[1]) or None, task_type="CAUSAL_LM")
    model = trained(get_peft_model(AutoModelForCausalLM.from_pretrained(path), config))
    model.save_pretrained(tmp_path / "actor")
    expected = logits(model)
    loaded = Pretrained(path=str(tmp_path / "actor")).load_causal_lm("cpu")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-4, rtol=1e-4)
    loaded.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "targets"), list(itertools.product([True, False], TARGETS)))
def test_an_adapter_of_a_run_reaches_files_and_engine_as_it_was_trained_or_is_refused(tied, targets, tmp_path):
    from verl.models.hf_state_dict import hf_state_dict

    source = Pretrained(path=base(tmp_path / "base", tied))
    lora = LoRA(rank=2, target_modules=tuple([targets] if isinstance(targets, str) else targets))
    if tied and {"embed_tokens", "lm_head"} & {*targets}:
        with refusal("lora.target_modules"):
            lora.apply(source.load_causal_lm("cpu"), causal_lm=True)
        return
    model = trained(lora.apply(source.load_causal_lm("cpu"), causal_lm=True))
    sent = {weight.name: weight.make() for weight in weights_of(model)}
    engine = AutoModelForCausalLM.from_pretrained(source.path)
    missing, unexpected = engine.load_state_dict(sent, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    torch.testing.assert_close(logits(engine), logits(model), atol=1e-4, rtol=1e-4)
    saved = hf_state_dict(model)
    (tmp_path / "actor").mkdir()
    assert saved.file is not None
    save_file({name: x.contiguous() for name, x in saved.tensors.items()}, tmp_path / "actor" / saved.file)
    for name, content in saved.files.items():
        (tmp_path / "actor" / name).write_bytes(content)
    loaded = Pretrained(path=str(tmp_path / "actor")).load_causal_lm("cpu")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


def test_a_head_of_its_own_is_kept_where_the_configuration_ties_it(tmp_path):
    path = base(tmp_path / "base", tied=False)
    expected = logits(AutoModelForCausalLM.from_pretrained(path))
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    source = Pretrained(path=path)
    assert source.load_skeleton("causal_lm") is None
    model = source.load_causal_lm("cpu")
    assert torch.equal(logits(model), expected)
    assert not model.config.tie_word_embeddings  # by which engines tie, and later loads


@pytest.mark.parametrize(("before", "after"), [("layers", "language_model.layers"), ("lora_A", "lora_A.actor")])
def test_an_adapter_whose_weights_are_not_those_of_its_base_model_is_refused(before, after, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base(tmp_path / "base", tied=False))
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained(get_peft_model(model, config)).save_pretrained(tmp_path / "actor")
    file = tmp_path / "actor" / "adapter_model.safetensors"
    save_file({name.replace(before, after): x for name, x in load_file(file).items()}, file)
    with refusal("path", value=str(tmp_path / "actor")):
        Pretrained(path=str(tmp_path / "actor")).load_causal_lm("cpu")


@pytest.mark.parametrize("whole", [[], ["embed_tokens", "lm_head"]])
def test_an_adapter_over_an_adapter_and_one_with_more_embeddings_are_what_peft_made(whole, tmp_path):
    paths, expected = [base(tmp_path / "base", tied=False)], None
    for number, targets in enumerate((["q_proj"], ["o_proj"])):
        model = Pretrained(path=paths[-1]).load_causal_lm("cpu")
        model.resize_token_embeddings(40)
        config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", modules_to_save=whole or None)
        adapted = get_peft_model(model, config)
        adapted.peft_config["default"].base_model_name_or_path = paths[-1]
        paths.append(str(tmp_path / str(number)))
        trained(adapted).save_pretrained(paths[-1], save_embedding_layers=True)
        expected = logits(adapted)
    model = Pretrained(path=paths[-1]).load_causal_lm("cpu")
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert model.config.vocab_size == 40
    assert Pretrained(path=paths[-1]).base_path() == paths[0]


def test_a_token_that_is_trained_in_a_tied_model_is_kept(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base(tmp_path / "base", tied=True))
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5], task_type="CAUSAL_LM")
    adapted = trained(get_peft_model(model, config))
    adapted.save_pretrained(tmp_path / "actor")
    loaded = Pretrained(path=str(tmp_path / "actor")).load_causal_lm("cpu")
    torch.testing.assert_close(logits(loaded), logits(adapted), atol=1e-4, rtol=1e-4)
