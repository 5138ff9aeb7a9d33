"""HybridActor: the numbers of Hugging Face, on one set of weights, in whatever state the user left it."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from http_client.servers import serving
from refusals import refusal, refused
from roles import start_actor
from rollout.speaking import Speaker
from typer.testing import CliRunner

import verl
from verl.cli.main import app
from verl.engines.optimizer import AdamW
from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor
from verl.hybrid.parallel import HybridConfig, sizes_of
from verl.models.images import images_of
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyImageText
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.server.config import ServerRollout
from verl.workers.actor import Actor

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


# The numbers of Hugging Face


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 9},
        {"max_length": 20},
        {"min_new_tokens": 6, "max_new_tokens": 8},
        {"max_new_tokens": 4, "min_new_tokens": 2, "eos_token_id": [1, 100_000], "do_sample": False},  # no such token
        {"max_new_tokens": 4, "attention_mask": None},  # pad tokens are padding
    ],
)
def test_greedy_responses_are_those_of_transformers(options, loaded, encoded):
    asked = {**encoded, **options}
    assert torch.equal(loaded.generate(**asked), loaded.model.generate(**asked))


def test_other_tokens_may_end_and_pad_a_response_as_in_transformers(loaded, encoded):
    free = loaded.model.generate(**encoded, max_new_tokens=12, eos_token_id=1)
    ends = [int(free[0, -3]), int(free[1, -6])]
    options = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 9}
    assert torch.equal(loaded.generate(**encoded, **options), loaded.model.generate(**encoded, **options))
    assert loaded.model.generation_config.eos_token_id == 1


def test_the_likeliest_of_one_is_drawn_as_the_greedy_one_and_samples_stand_side_by_side(loaded, encoded):
    drawn = loaded.generate(**encoded, do_sample=True, top_k=1, num_return_sequences=2, max_new_tokens=6)
    greedy = loaded.generate(**encoded, max_new_tokens=6)
    assert drawn.shape[0] == 2 * len(TEXTS)
    assert torch.equal(drawn, greedy.repeat_interleave(2, dim=0))


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


def test_a_forward_with_labels_trains_in_either_state_and_its_gradients_survive_generating(actor, encoded):
    ids = encoded["input_ids"]
    for state in (actor.eval(), actor.train()):
        state(input_ids=ids, labels=ids).loss.backward()
        before = [p.grad.clone() for p in actor.parameters()]
        actor.generate(**encoded, max_new_tokens=3)
        assert all(torch.equal(p.grad, g) for p, g in zip(actor.parameters(), before, strict=True))
        actor.model.zero_grad()


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


def load(**config):
    return lambda dir32: HybridActor.from_pretrained(dir32, hybrid_config=config)


def of_whole(**source):
    return lambda dir32: HybridActor.from_pretrained(dir32, **source)


test_settings_that_cannot_be_are_refused_by_their_keys = refused(
    ("hybrid_config.tp_size", "torchrun --nproc_per_node=4", load(tp_size=4)),
    ("hybrid_config.dp_size", 2, load(dp_size=2)),
    ("hybrid_config.tp_size", 0, load(tp_size=0)),
    ("hybrid_config.fsdp_sharding", "HALF", load(fsdp_sharding="HALF")),
    ("hybrid_config.tp_sise", "tp_size?", load(tp_sise=2)),
    ("hybrid_config.dp_size", "2", load(dp_size="2")),
    ("hybrid_config", "mapping", of_whole(hybrid_config="NO_SHARD")),
)


def test_in_one_process_nothing_is_divided(dir32):
    actor = HybridActor.from_pretrained(dir32, {"fsdp_sharding": "FULL_SHARD", "tp_size": 1}, device="cpu")
    assert actor.process_group is None
    loaded = HybridActor.from_pretrained(dir32, contiguous=True, auto_cache_clear=True, device="cpu")
    assert (loaded.contiguous, loaded.auto_cache_clear) == (True, True)


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

    with pytest.raises(ConfigError, match=r"not contiguous in memory: lm_head.weight. Give contiguous=True to"):
        HybridActor(made())
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


def of_architecture(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return HybridActor.from_pretrained(str(tmp_path))


test_what_cannot_be_an_actor_is_refused_by_name = refused(
    ("model", "HybridActor.from_pretrained", lambda dir32: HybridActor(str(dir32))),
    ("model", "generate", lambda model32: HybridActor(model32.load_backbone("cpu"))),
    ("from_pretrained.path", "/nowhere/at/all", lambda: HybridActor.from_pretrained("/nowhere/at/all")),
    ("from_pretrained.path", "weights", of_architecture),
    ("from_pretrained.dtyp", "dtype?", of_whole(dtyp="bfloat16")),
    ("from_pretrained.device", "cuda:99", lambda dir32: HybridActor.from_pretrained(dir32, device="cuda:99")),
    ("rollout", "vlm", lambda model32: HybridActor(model32.load_causal_lm("cpu"), rollout="vlm")),
)


def asked(**options):
    return lambda loaded, encoded: loaded.generate(**{**encoded, **options})


test_what_cannot_be_generated_is_refused_by_name = refused(
    ("generate.num_beam", "num_return_sequences", asked(num_beam=2)),
    ("generate.temperatur", "temperature?", asked(temperatur=1.0)),
    ("temperature", 0.0, asked(do_sample=True, temperature=0.0)),
    ("temperature", 1e-40, asked(do_sample=True, temperature=1e-40)),
    ("seed", 2**70, asked(do_sample=True, seed=2**70)),
    ("temperature", "hot", asked(do_sample=True, temperature="hot")),
    ("top_p", 1.5, asked(do_sample=True, top_p=1.5)),
    ("max_new_tokens", 64, asked(max_new_tokens=60)),
    ("max_length", -8, asked(max_length=5)),
    ("num_return_sequences", 0, asked(num_return_sequences=0)),
    ("attention_mask", "left", lambda loaded, encoded: loaded.generate(**_with_mask(encoded, lambda x: x.flip(1)))),
    ("attention_mask", "shape", lambda loaded, encoded: loaded.generate(**_with_mask(encoded, lambda x: x[:, 1:]))),
    ("input_ids", "[B P]", asked(input_ids="1+2=", attention_mask=None)),
    ("input_ids", "[B P]", asked(input_ids=torch.ones(1, 0, dtype=torch.int64), attention_mask=None)),
)


def _with_mask(encoded, changed):
    return {**encoded, "attention_mask": changed(encoded["attention_mask"])}


def test_an_engine_that_needs_a_tokenizer_is_refused_without_one(model32, encoded):
    without = HybridActor(model32.load_causal_lm("cpu"), rollout="scripted")
    with pytest.raises(ConfigError, match="tokenizer is missing: this rollout engine needs one"):
        without.generate(**encoded, pad_token_id=0)


def test_one_engine_serves_calls_of_any_options_until_responses_end_otherwise(dir32, encoded):
    actor = HybridActor.from_pretrained(dir32, device="cpu")
    actor.generate(**encoded, max_new_tokens=2)
    engine = actor.rollout_engine
    actor.generate(**encoded, max_new_tokens=3, do_sample=True, top_p=0.5)
    assert actor.rollout_engine is engine
    actor.generate(**encoded, max_new_tokens=3, eos_token_id=7)
    assert actor.rollout_engine is not engine


# Engines of its own, and elsewhere


def test_auto_draws_what_the_engine_draws_that_it_takes(dir32, encoded):
    chosen = HybridActor.from_pretrained(dir32, rollout="auto", device="cpu")
    own = HybridActor(chosen.model, chosen.tokenizer)
    for asked in ({"max_new_tokens": 3}, {"max_new_tokens": 6, "do_sample": True, "top_p": 0.9, "seed": 3}):
        assert torch.equal(chosen.generate(**encoded, **asked), own.generate(**encoded, **asked))
    engine = chosen.rollout_engine
    chosen.generate(**encoded, max_new_tokens=2)
    assert chosen.rollout_engine is engine


@pytest.mark.slow
def test_a_server_is_asked_for_what_each_call_asks_for(dir32, encoded):
    speaker = Speaker(dir32)
    with serving(speaker.post, speaker.page) as server:
        rollout = ServerRollout(endpoint=server.endpoint(), model="the-actor")
        actor = HybridActor.from_pretrained(dir32, rollout=rollout, device="cpu")
        own = HybridActor(actor.model, actor.tokenizer)
        for length in (2, 5, 3):
            greedy = {"max_new_tokens": length, "min_new_tokens": length}
            assert torch.equal(actor.generate(**encoded, **greedy), own.generate(**encoded, **greedy))
        for temperature in (0.5, 2.0):
            actor.generate(**encoded, do_sample=True, temperature=temperature, max_new_tokens=2)
            assert [asked.body["temperature"] for asked in server.asked if "seed" in asked.body][-1] == temperature
        actor.close()


def test_an_adapter_of_a_model_that_reads_images_opens_and_merges_with_its_processor(tmp_path):
    source = TinyImageText()
    HybridActor(source.load_causal_lm("cpu"), source.load_tokenizer()).save_pretrained(tmp_path / "base")
    HybridActor.from_pretrained(tmp_path / "base", lora={"rank": 2}).save_pretrained(tmp_path / "adapter")
    words = ["checkpoint", "export", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for name in ("base", "adapter", "merged"):
        assert images_of(Pretrained(path=str(tmp_path / name)).load_tokenizer()) is not None
    for second in (
        lambda path: HybridActor.from_pretrained(path, lora={"rank": 2}),
        lambda path: Actor(model=Pretrained(path=str(path)), optimizer=AdamW(), lora=LoRA(rank=2)),
    ):
        with refusal("lora", value=str(tmp_path / "adapter")):  # it would be saved without the first one
            second(tmp_path / "adapter")
