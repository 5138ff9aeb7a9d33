"""HybridActor: the numbers of Hugging Face, on one set of weights, in whatever state the user left it."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch
from random_models import save_random_model
from roles import start_actor

import verl
from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor
from verl.hybrid.parallel import HybridConfig, sizes_of
from verl.models.pretrained import Pretrained
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout

TEXTS = ["1+2=", "what is 6*7? ", "9-"]


@pytest.fixture(scope="module")
def loaded(dir32: Path):
    """An actor that no test changes."""
    return HybridActor.from_pretrained(dir32, device="cpu")


@pytest.fixture
def actor(dir32: Path) -> HybridActor:
    """One to be trained."""
    return HybridActor.from_pretrained(dir32, device="cpu")


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def faults_of(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# The numbers of Hugging Face


@pytest.mark.parametrize(
    "options", [{}, {"max_new_tokens": 9}, {"max_length": 20}, {"min_new_tokens": 6, "max_new_tokens": 8}]
)
def test_greedy_responses_are_those_of_transformers(options, loaded, encoded):
    assert torch.equal(loaded.generate(**encoded, **options), loaded.model.generate(**encoded, **options))


def test_other_tokens_may_end_and_pad_a_response_as_in_transformers(loaded, encoded):
    free = loaded.model.generate(**encoded, max_new_tokens=12, eos_token_id=1)
    ends = [int(free[0, -3]), int(free[1, -6])]
    options = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 9}
    assert torch.equal(loaded.generate(**encoded, **options), loaded.model.generate(**encoded, **options))
    assert loaded.model.generation_config.eos_token_id == 1


def test_an_end_that_the_model_cannot_draw_ends_nothing_as_in_transformers(loaded, encoded):
    asked = {"max_new_tokens": 4, "min_new_tokens": 2, "eos_token_id": [1, 100_000]}
    assert torch.equal(loaded.generate(**encoded, **asked), loaded.model.generate(**encoded, **asked, do_sample=False))


def test_without_a_mask_pad_tokens_are_padding_as_in_transformers(loaded, encoded):
    ids = encoded["input_ids"]
    assert torch.equal(loaded.generate(ids, max_new_tokens=4), loaded.model.generate(ids, max_new_tokens=4))


def test_the_likeliest_of_one_is_drawn_as_the_greedy_one_and_samples_stand_side_by_side(loaded, encoded):
    drawn = loaded.generate(**encoded, do_sample=True, top_k=1, num_return_sequences=2, max_new_tokens=6)
    greedy = loaded.generate(**encoded, max_new_tokens=6)
    assert drawn.shape[0] == 2 * len(TEXTS)
    assert torch.equal(drawn, greedy.repeat_interleave(2, dim=0))


def test_samples_have_the_distribution_of_the_model(loaded, tokenizer):
    ids = tokenizer(["1+2="], return_tensors="pt")["input_ids"]
    drawn = loaded.generate(
        ids, do_sample=True, top_k=0, temperature=1.5, num_return_sequences=4000, max_new_tokens=1, seed=3
    )
    counts = torch.bincount(drawn[:, -1], minlength=len(tokenizer)) / 4000
    with torch.no_grad():
        wanted = (loaded(input_ids=ids).logits[0, -1] / 1.5).softmax(-1)
    assert float((counts - wanted).abs().sum()) < 2.5 * float((wanted * (1 - wanted) / 4000).sqrt().sum())


def test_only_the_fifty_likeliest_are_drawn_unless_told_otherwise_as_in_transformers(loaded, tokenizer):
    ids = tokenizer(["1+2="], return_tensors="pt")["input_ids"]
    options = {"do_sample": True, "temperature": 9.0, "num_return_sequences": 2000, "max_new_tokens": 1, "seed": 1}
    with torch.no_grad():
        likeliest = set(loaded(input_ids=ids).logits[0, -1].topk(50).indices.tolist())
    assert set(loaded.generate(ids, **options)[:, -1].tolist()) == likeliest
    assert set(loaded.generate(ids, top_k=0, **options)[:, -1].tolist()) > likeliest


def test_a_loss_and_its_gradients_are_those_of_the_model_bit_for_bit(actor, dir32, encoded):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(dir32, dtype=torch.float32)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    wanted = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
    actor.generate(**encoded, max_new_tokens=3)
    found = actor(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert torch.equal(found, wanted)
    found.backward()
    wanted.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(actor.parameters(), theirs.parameters(), strict=True))


# Noise


def test_a_seed_repeats_a_call_and_without_one_torch_decides(loaded, encoded):
    def draw(**options):
        return loaded.generate(**encoded, do_sample=True, max_new_tokens=6, **options)

    assert torch.equal(draw(seed=5), draw(seed=5))
    assert not torch.equal(draw(seed=5), draw(seed=6))
    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)
    assert torch.equal(
        draw(generator=torch.Generator().manual_seed(2)), draw(generator=torch.Generator().manual_seed(2))
    )


def test_greedy_responses_draw_no_random_number(loaded, encoded):
    before = torch.get_rng_state()
    loaded.generate(**encoded, max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_draws_what_the_actor_of_a_run_draws(dir32, model32, prompts):
    batch = prompts(*TEXTS)
    worker = start_actor(model32, HFRollout(max_new_tokens=8, temperature=0.9, top_k=20), seed=4)
    rows = worker.generate(batch, GenerationRequest(7, num_samples=2))
    ours = HybridActor.from_pretrained(dir32, device="cpu", seed=4).generate(
        batch["prompts"], batch["prompt_mask"], do_sample=True, temperature=0.9, top_k=20, max_new_tokens=8,
        num_return_sequences=2, seed=7,
    )  # fmt: skip
    assert torch.equal(ours, rows["input_ids"])


# States


@pytest.mark.parametrize("is_training", [True, False])
def test_generating_leaves_the_state_as_it_was_module_by_module(is_training, actor, encoded):
    actor.train(is_training)
    actor.model.model.layers[0].train(not is_training)
    before = [module.training for module in actor.model.modules()]
    actor.generate(**encoded, max_new_tokens=2)
    assert [module.training for module in actor.model.modules()] == before
    with pytest.raises(IndexError):
        actor.generate(torch.full((1, 2), 10**6), max_new_tokens=2)  # no such token: fails within the model
    assert [module.training for module in actor.model.modules()] == before


def test_a_forward_with_labels_trains_in_either_state(actor, encoded):
    ids = encoded["input_ids"]
    for state in (actor.eval(), actor.train()):
        state(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in actor.parameters())
        actor.model.zero_grad()


def test_gradients_that_wait_for_their_step_survive_generating(actor, encoded):
    ids = encoded["input_ids"]
    actor.train()(input_ids=ids, labels=ids).loss.backward()
    before = [p.grad.clone() for p in actor.parameters()]
    actor.generate(**encoded, max_new_tokens=3)
    assert all(torch.equal(p.grad, g) for p, g in zip(actor.parameters(), before, strict=True))


def test_nothing_is_copied_and_the_next_sample_is_of_the_new_weights(actor, encoded):
    ids = encoded["input_ids"]
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.05)
    places = {name: p.data_ptr() for name, p in actor.named_parameters()}
    first = actor.generate(**encoded, max_new_tokens=8)
    for _ in range(3):
        optimizer.zero_grad()
        actor(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    second = actor.generate(**encoded, max_new_tokens=8)
    assert {name: p.data_ptr() for name, p in actor.named_parameters()} == places
    assert not torch.equal(first, second)
    assert torch.equal(second, actor.model.generate(**encoded, max_new_tokens=8))


def tensor_bytes() -> int:
    """Of all storages that Python knows of."""
    storages = {}
    for found in gc.get_objects():
        is_tensor = type(found) in (torch.Tensor, torch.nn.Parameter)  # torch.compile leaves some that have no memory
        if is_tensor and found.layout == torch.strided:
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def test_keys_values_and_all_else_that_generating_took_are_gone_when_it_is_done(actor, encoded):
    out = actor.generate(**encoded, max_new_tokens=3)
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        out = actor.generate(**encoded, max_new_tokens=3)
        assert tensor_bytes() == before
    finally:
        gc.enable()
    assert out.shape[1] == encoded["input_ids"].shape[1] + 3


# Settings


def test_settings_that_cannot_be_are_refused_by_their_keys(dir32):
    def load(**config):
        return faults_of(HybridActor.from_pretrained, dir32, hybrid_config=config)

    assert load(tp_size=4) == (
        "hybrid_config.tp_size is 4: it needs a multiple of 4 processes, and there is 1. Start them with `torchrun "
        "--nproc_per_node=4 SCRIPT.py`, or leave it out."
    )
    assert load(dp_size=2).startswith("hybrid_config.dp_size is 2: it needs 2 processes, and there is 1.")
    assert load(tp_size=0) == "hybrid_config.tp_size is 0: must be at least 1."
    assert "fsdp_sharding is 'HALF': expected" in load(fsdp_sharding="HALF")
    assert (
        load(tp_sise=2)
        == "hybrid_config.tp_sise is not a known key: HybridConfig has no such field. Did you mean tp_size?"
    )
    assert "expected a whole number" in load(dp_size="2")
    assert "expected a mapping" in faults_of(HybridActor.from_pretrained, dir32, hybrid_config="NO_SHARD")


def test_in_one_process_nothing_is_divided(dir32):
    actor = HybridActor.from_pretrained(dir32, {"fsdp_sharding": "FULL_SHARD", "tp_size": 1}, device="cpu")
    assert actor.process_group is None


@pytest.mark.parametrize(
    ("config", "processes", "sizes"),
    [
        ({"tp_size": 2}, 4, (2, 1, 2)),
        ({"dp_size": 4}, 4, (4, 1, 1)),
        ({"tp_size": 2, "fsdp_sharding": "FULL_SHARD"}, 8, (1, 4, 2)),
        ({"tp_size": 2, "fsdp_sharding": "HYBRID_SHARD"}, 8, (2, 2, 2)),  # of two machines
    ],
)
def test_processes_are_replicas_shards_and_siblings(config, processes, sizes, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert sizes_of(HybridConfig(**config), processes) == sizes


def test_the_cache_setting_of_the_process_holds_where_the_actor_has_none(loaded, monkeypatch):
    released: list = []
    monkeypatch.setattr("verl.hybrid.actor.release_cached", lambda device, **_: released.append(device))
    for of_process, of_actor, count in ((False, None, 0), (True, None, 1), (True, False, 1), (False, True, 2)):
        monkeypatch.setattr(verl.config, "auto_cache_clear", of_process)
        monkeypatch.setattr(loaded, "auto_cache_clear", of_actor)
        with loaded.sampling():
            pass
        assert len(released) == count


@pytest.mark.parametrize("setting", [{"contiguous": True}, {"hybrid_config": {"contiguous": True}}])
def test_parameters_that_are_views_are_refused_or_laid_out_anew(model32, encoded, caplog, setting):
    def made():
        model = model32.load_causal_lm("cpu")
        head = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(head.detach().t().contiguous().t())
        return model

    assert "not contiguous in memory: lm_head.weight. Give contiguous=True to" in faults_of(HybridActor, made())
    with caplog.at_level(logging.INFO):
        mended = HybridActor(made(), **setting)
    assert "made contiguous: lm_head.weight" in caplog.text
    assert mended.model.lm_head.weight.is_contiguous()
    whole = HybridActor(model32.load_causal_lm("cpu"))
    assert torch.equal(mended.generate(**encoded, max_new_tokens=4), whole.generate(**encoded, max_new_tokens=4))


def test_a_low_rank_adapter_trains_alone_and_is_saved_as_one(dir32, encoded, tmp_path):
    actor = HybridActor.from_pretrained(dir32, lora={"rank": 2}, device="cpu")
    ids = encoded["input_ids"]
    actor(input_ids=ids, labels=ids).loss.backward()
    assert {name.split(".")[-3] for name, p in actor.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}
    assert torch.equal(actor.generate(**encoded, max_new_tokens=4), actor.model.generate(**encoded, max_new_tokens=4))
    actor.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_config.json").is_file()


def test_what_is_saved_is_what_transformers_loads(actor, tmp_path):
    actor.save_pretrained(tmp_path / "saved")
    again = Pretrained(path=str(tmp_path / "saved")).load_causal_lm("cpu").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in actor.state_dict().items())
    assert (tmp_path / "saved/tokenizer.json").is_file()


def test_what_cannot_be_an_actor_is_refused_in_words(dir32, model32, tmp_path):
    assert "HybridActor.from_pretrained loads one" in faults_of(HybridActor, str(dir32))
    assert "has no generate: an actor needs forward and generate" in faults_of(
        HybridActor, model32.load_backbone("cpu")
    )
    assert "no such directory" in faults_of(HybridActor.from_pretrained, "/nowhere/at/all")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert faults_of(HybridActor.from_pretrained, str(tmp_path)).startswith("from_pretrained.path is ")
    assert "from_pretrained.dtyp is not a known key: Pretrained has no such field. Did you mean dtype?" in faults_of(
        HybridActor.from_pretrained, dir32, dtyp="bfloat16"
    )
    assert "rollout is 'vlm': this version has" in faults_of(HybridActor, model32.load_causal_lm("cpu"), rollout="vlm")


def test_what_cannot_be_generated_is_refused_in_words(loaded, encoded):
    def told(**options):
        return faults_of(loaded.generate, **{**encoded, **options})

    assert told(num_beam=2).startswith("generate.num_beam is not a known key.")
    assert told(temperatur=1.0) == "generate.temperatur is not a known key. Did you mean temperature?"
    assert "temperature is 0.0: must be above 0" in told(do_sample=True, temperature=0.0)
    assert "temperature is 'hot': expected a number" in told(do_sample=True, temperature="hot")
    assert "top_p is 1.5: must lie in (0, 1]" in told(do_sample=True, top_p=1.5)
    assert "but the context length is 64" in told(max_new_tokens=60)
    assert "max_length leaves -8 new tokens" in told(max_length=5)
    assert "num_return_sequences is 0: must be a whole number, at least 1" in told(num_return_sequences=0)
    assert "min_new_tokens is '3': must be a whole number" in told(min_new_tokens="3")
    assert "padded on the left" in told(attention_mask=encoded["attention_mask"].flip(1))
    assert "has another shape" in told(attention_mask=encoded["attention_mask"][:, 1:])
    assert "expected token ids [B P]" in told(input_ids="1+2=", attention_mask=None)


def test_what_the_generation_configuration_asks_for_beyond_us_is_told(model32, caplog):
    model = model32.load_causal_lm("cpu")
    model.generation_config.repetition_penalty = 1.05
    HybridActor(model)
    assert "has repetition_penalty=1.05, which is not supported here" in caplog.text


def test_another_engine_is_taken_by_name_or_as_a_description(dir32, encoded, tokenizer):
    scripted = HybridActor.from_pretrained(dir32, rollout="scripted", device="cpu")
    out = scripted.generate(**encoded, max_new_tokens=4)
    assert tokenizer.batch_decode(out, skip_special_tokens=True) == ["1+2=1", "what is 6*7? 2", "9-1"]
    without = HybridActor(scripted.model, rollout="scripted")
    assert "tokenizer is missing: this rollout engine needs one" in faults_of(
        without.generate, **encoded, pad_token_id=0
    )


def test_one_engine_serves_calls_of_any_options_until_responses_end_otherwise(dir32, encoded):
    actor = HybridActor.from_pretrained(dir32, device="cpu")
    actor.generate(**encoded, max_new_tokens=2)
    engine = actor.rollout_engine
    actor.generate(**encoded, max_new_tokens=3, do_sample=True, top_p=0.5)
    assert actor.rollout_engine is engine
    actor.generate(**encoded, max_new_tokens=3, eos_token_id=7)
    assert actor.rollout_engine is not engine


def test_a_model_that_ignores_padding_is_never_shown_any(tmp_path, encoded):
    directory = save_random_model(tmp_path / "model", "qwen2", torch.float32)
    model = Pretrained(path=str(directory)).load_causal_lm("cpu")
    plain = model.forward

    def blind(*args, attention_mask=None, position_ids=None, **kwargs):
        return plain(*args, **kwargs)

    model.forward = blind
    actor = HybridActor(model)
    width = encoded["input_ids"].shape[1]
    together = actor.generate(**encoded, max_new_tokens=4, do_sample=False)[:, width:]
    for ids, mask, found in zip(encoded["input_ids"], encoded["attention_mask"], together, strict=True):
        text = ids[mask.bool()][None]
        alone = actor.generate(text, max_new_tokens=4, do_sample=False)[0, text.shape[1] :]
        assert torch.equal(found[: len(alone)], alone)
