"""What is done to an actor between two calls: followed, or refused until the changed model is set."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from cases import exhaustive
from random_models import save_random_model
from refusals import refusal

from verl.errors import ConfigError, RolloutError
from verl.hybrid.actor import HybridActor
from verl.hybrid.engine_faults import form_difference, form_of
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout

ASKED = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = save_random_model(tmp_path_factory.mktemp("model"), "qwen2", torch.float32, hidden_size=128)
    return Pretrained(path=str(path))


@pytest.fixture
def encoded(tokenizer):
    return tokenizer(["1+2=", "what is 6*7? "], padding=True, return_tensors="pt")


@pytest.fixture
def actor(source, tokenizer, encoded):
    """One that has generated, so that its engine was built for the model it has."""
    actor = HybridActor(source.load_causal_lm("cpu"), tokenizer)
    actor.generate(**encoded, **ASKED)
    return actor


def other_model(source, seed: int = 11):
    model = source.load_causal_lm("cpu")
    torch.manual_seed(seed)
    return type(model)(copy.deepcopy(model.config)).eval()


def with_adapter(model, **options):
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}))
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted


def with_virtual_tokens(source, kind: str):
    import peft

    return peft.get_peft_model(source.load_causal_lm("cpu"), getattr(peft, kind)("CAUSAL_LM", num_virtual_tokens=3))


# rollout=hf samples from what is there


def replace_model(actor, source):
    actor.model = other_model(source)


def replace_block(actor, source):
    actor.model.model.layers[1] = other_model(source).model.layers[1]


def replace_parameter(actor, source):
    actor.model.model.norm.weight = torch.nn.Parameter(torch.linspace(-2, 2, 128))


def replace_head(actor, source):
    torch.manual_seed(5)
    actor.model.lm_head = torch.nn.Linear(128, actor.model.config.vocab_size, bias=False)


def resize(actor, source):
    torch.manual_seed(5)
    actor.model.resize_token_embeddings(130)
    torch.nn.init.normal_(actor.model.lm_head.weight)


def tie(actor, source):
    actor.model.config.tie_word_embeddings = True
    actor.model.tie_weights()


def load(actor, source):
    actor.load_state_dict(other_model(source).state_dict())


def assign(actor, source):
    actor.model.load_state_dict(other_model(source).state_dict(), assign=True)


def cast(dtype):
    def change(actor, source):
        actor.model.to(dtype)

    return change


def wrap(actor, source):
    actor.model = with_adapter(actor.model)


def wrap_and_disable(actor, source):
    actor.model = with_adapter(actor.model)
    actor.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=1)
    actor.model.disable_adapter_layers()


def wrap_and_merge(actor, source):
    actor.model = with_adapter(actor.model)
    actor.model = actor.model.merge_and_unload()


def inject(actor, source):
    with_adapter(actor.model)


def compile_it(actor, source):
    actor.model = torch.compile(other_model(source), backend="eager")


def hook(actor, source):
    actor.model.model.norm.register_forward_hook(lambda module, args, output: output.roll(1, dims=-1))


def quantize(actor, source):
    actor.model = torch.ao.quantization.quantize_dynamic(actor.model, {torch.nn.Linear}, dtype=torch.qint8)


def end_otherwise(actor, source):
    free = actor.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    actor.model.generation_config.eos_token_id = int(free[0, -2])


CHANGES = [
    replace_model, replace_block, replace_parameter, replace_head, resize, tie, load, assign, wrap, wrap_and_disable,
    wrap_and_merge, inject, hook, end_otherwise, cast(torch.float16), cast(torch.bfloat16),
    cast(torch.float64),
]  # fmt: skip
IN_SHORT = (replace_block, resize, tie, wrap, wrap_and_disable, wrap_and_merge, hook)


def test_a_model_quantized_by_the_batch_is_refused_by_name(actor, source, encoded):
    quantize(actor, source)
    with refusal("model", "model"):
        actor.generate(**encoded, **ASKED)


@pytest.mark.parametrize("change", [*IN_SHORT, *exhaustive(*(x for x in CHANGES if x not in IN_SHORT), compile_it)])
def test_the_next_samples_are_those_of_the_model_that_is_set(change, actor, source, encoded):
    actor.train()
    change(actor, source)
    actor.model = actor.model
    expected = actor.model.eval().generate(**encoded, **ASKED, do_sample=False)
    actor.train()
    assert torch.equal(actor.generate(**encoded, **ASKED), expected)
    assert actor.training


IN_PLACE = [load, assign, hook, end_otherwise, replace_parameter]


@pytest.mark.parametrize("change", IN_PLACE)
def test_weights_and_hooks_are_followed(change, actor, source, encoded):
    change(actor, source)
    expected = actor.model.eval().generate(**encoded, **ASKED, do_sample=False)
    assert torch.equal(actor.generate(**encoded, **ASKED), expected)


def test_an_adapter_may_be_switched(actor, source, encoded):
    actor.model = with_adapter(actor.model)
    for switch in (actor.model.disable_adapter_layers, actor.model.enable_adapter_layers):
        switch()
        assert torch.equal(actor.generate(**encoded, **ASKED), actor.model.generate(**encoded, **ASKED))


@pytest.mark.parametrize(
    "change", [replace_block, hook, *exhaustive(replace_model, cast(torch.float64), wrap, tie, inject)]
)
def test_what_was_proven_of_a_model_is_proven_anew_of_the_one_that_is_set(change, actor, source, encoded):
    change(actor, source)
    if change is not hook:
        actor.model = actor.model
    plain = type(actor.model).forward

    def blind(*args, attention_mask=None, position_ids=None, **kwargs):
        return plain(actor.model, *args, **kwargs)

    actor.generate(**encoded, **ASKED)
    actor.model.forward = blind
    with pytest.raises(ConfigError, match="its forward was .* and is .* with a forward of its own"):
        actor.generate(**encoded, **ASKED)
    actor.model = actor.model
    width = encoded["input_ids"].shape[1]
    together = actor.generate(**encoded, **ASKED)[:, width:]  # without padding, which this model would see
    for ids, mask, found in zip(encoded["input_ids"], encoded["attention_mask"], together, strict=True):
        text = ids[mask.bool()][None]
        alone = actor.generate(text, **ASKED)[0, text.shape[1] :]
        assert torch.equal(found[: len(alone)], alone)


def test_weights_alone_are_no_change_and_neither_are_switches_of_training(actor, encoded, tmp_path):
    form, engine = form_of(actor.model), actor.rollout_engine
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.1)
    actor.train()(input_ids=encoded["input_ids"], labels=encoded["input_ids"]).loss.backward()
    optimizer.step()
    actor.model.config.use_cache = False
    actor.model.config.pad_token_id = 3
    actor.model.requires_grad_(False)
    actor.model.config.architectures = None
    actor.model.save_pretrained(tmp_path / "saved")
    assert actor.model.config.architectures is not None
    assert not form_difference(form, form_of(actor.model))
    actor.generate(**encoded, **ASKED)
    assert actor.rollout_engine is engine
    actor.model.gradient_checkpointing_enable()
    assert not form_difference(form, form_of(actor.model))


def other_block(actor, source):
    actor.model.model.layers[1].mlp = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_block, "model.layers.1.mlp was Qwen2MLP .* and is Identity"),
        (replace_block, "model.layers.1 was Qwen2DecoderLayer .* and is Qwen2DecoderLayer .* more"),
        (replace_head, "lm_head was Linear .* and is Linear "),
        (resize, "model.embed_tokens.* was .*, lm_head.* was "),
        (tie, "lm_head.weight was .* 'model.embed_tokens.weight'"),
        (cast(torch.float16), r"model.embed_tokens.weight was \(.*'float32'.* is .*'float16'"),
        (inject, "model.layers.0.self_attn.q_proj was Linear .* and is Linear "),
    ],
)
def test_a_changed_form_is_refused_until_it_is_set(change, told, actor, source, encoded):
    change(actor, source)
    for _ in range(2):
        with pytest.raises(ConfigError, match=told) as caught:
            actor.generate(**encoded, **ASKED)
        assert str(caught.value).endswith("Set `actor.model = actor.model` to go on with the changed model.")


def test_engine_tokenizer_and_seed_may_be_replaced(actor, tokenizer, encoded):
    drawn = {"do_sample": True, "seed": 1, "max_new_tokens": 8}
    first = actor.generate(**encoded, **drawn)
    actor.seed = 5
    other = actor.generate(**encoded, **drawn)
    assert torch.equal(other, HybridActor(actor.model, tokenizer, seed=5).generate(**encoded, **drawn))
    assert not torch.equal(other, first)
    actor.rollout = HFRollout(max_rows=1)
    assert torch.equal(actor.generate(**encoded, **drawn), other)
    assert actor.rollout_engine.options.max_rows == 1
    actor.rollout = "scripted"
    assert tokenizer.batch_decode(actor.generate(**encoded, max_new_tokens=4), skip_special_tokens=True)[0] == "1+2=1"
    with pytest.raises(ConfigError, match="this version has"):
        actor.rollout = "vlm"
    actor.rollout = "hf"
    actor.tokenizer = copy.deepcopy(tokenizer)
    actor.tokenizer.pad_token, actor.model.generation_config.pad_token_id = "7", None
    free = actor.generate(**{name: x[1:] for name, x in encoded.items()}, max_new_tokens=8)
    stop = int(free[0, -3])
    asked = {**encoded, "max_new_tokens": 8, "eos_token_id": [stop, 1]}
    wanted = actor.model.generate(**asked, pad_token_id=actor.tokenizer.pad_token_id)
    assert torch.equal(actor.generate(**asked), wanted)


def test_what_is_no_actor_cannot_be_set_and_the_former_model_stays(actor, source, encoded):
    before = actor.generate(**encoded, **ASKED)
    for model, told in [
        ("a/path", "expected a loaded model"),
        (torch.nn.Linear(2, 2), "has no generate"),
        (source.load_backbone("cpu"), "has no generate"),
        (with_virtual_tokens(source, "PromptTuningConfig"), "which puts virtual tokens before each text"),
        (with_virtual_tokens(source, "PrefixTuningConfig"), "which puts virtual tokens before each text"),
    ]:
        with pytest.raises(ConfigError, match=told):
            actor.model = model
    assert torch.equal(actor.generate(**encoded, **ASKED), before)


def test_settings_of_generation_that_are_set_later_are_told_once(actor, encoded, caplog):
    actor.model.generation_config.repetition_penalty = 1.5
    for _ in range(2):
        actor.generate(**encoded, **ASKED)
    assert caplog.text.count("has repetition_penalty=1.5, which is not supported here") == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda actor: pickle.loads(pickle.dumps(actor))])
def test_a_copy_is_an_actor_of_its_own(copied, actor, encoded):
    before = actor.generate(**encoded, **ASKED)
    own = copied(actor)
    with torch.no_grad():
        own.model.lm_head.weight.neg_()
    assert torch.equal(actor.generate(**encoded, **ASKED), before)
    assert torch.equal(own.generate(**encoded, **ASKED), own.model.generate(**encoded, **ASKED))
    assert copy.copy(actor).model is actor.model


# Engines with weights of their own: what is refused before one is started

VLLM = VLLMRollout(max_num_seqs=16, max_num_batched_tokens=64, kv_cache_gib=0.05)
ADAPTER = replace(VLLM, lora="adapter")


def half_and_back(actor, source):
    actor.model.half().float()


def other_rope(actor, source):
    config = actor.model.config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5.0}


def say_tied(actor, source):
    actor.model.config.tie_word_embeddings = True


def other_vocabulary(actor, source):
    actor.model.lm_head = torch.nn.Linear(128, 200, bias=False)


def dora(actor, source):
    actor.model = with_adapter(actor.model, use_dora=True)


def whole_modules(actor, source):
    actor.model = with_adapter(actor.model, modules_to_save=["lm_head"], target_modules=["q_proj"])


def merge_and_disable(actor, source):
    actor.model = with_adapter(actor.model)
    actor.model.merge_adapter()
    actor.model.disable_adapter_layers()


def merge_what_is_sent(actor, source):
    actor.model = with_adapter(actor.model)
    actor.model.merge_adapter()


REFUSED = [
    (cast(torch.float16), VLLM, r"model.dtype is float16, and model.rotary_emb.inv_freq differs .*\.half\(\)"),
    (cast(torch.bfloat16), VLLM, "Load the model with dtype='bfloat16'"),
    (half_and_back, VLLM, "model.dtype is float32, and model.rotary_emb.inv_freq differs from model.config"),
    (cast(torch.float64), VLLM, "dtype is float64: vLLM computes in"),
    (other_rope, VLLM, "inv_freq differs from model.config"),
    (say_tied, VLLM, "output head is no longer tied"),
    (other_vocabulary, VLLM, r"vocab_size is \d+, and the output head has 200 rows"),
    (quantize, VLLM, "model is quantized"),
    (inject, VLLM, "but is not a PeftModel: set actor.model"),
    (dora, VLLM, "is not plain LoRA"),
    (whole_modules, VLLM, r"is not plain LoRA \(ModulesToSaveWrapper\)"),
    (merge_and_disable, VLLM, "is merged into .* and disabled"),
    (merge_what_is_sent, ADAPTER, "is merged into .* and sent to the engine as well"),
    (wrap_and_disable, ADAPTER, "has its adapter disabled, and rollout.lora=adapter"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "rollout", "told"), REFUSED)
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_what_an_engine_cannot_be_given_is_refused_by_its_cause(change, rollout, told, actor, source, encoded):
    change(actor, source)
    if change not in (merge_and_disable, merge_what_is_sent, wrap_and_disable):  # a forward of peft would unmerge
        actor.model = actor.model
    actor.rollout = rollout
    for _ in range(2):
        with pytest.raises(ConfigError, match=told):
            actor.generate(**encoded, **ASKED)
    assert actor.rollout_engine is None
    actor.rollout, actor.model = "hf", source.load_causal_lm("cpu")
    assert torch.equal(actor.generate(**encoded, **ASKED), actor.model.generate(**encoded, **ASKED))


# Threads


def test_calls_of_threads_wait_for_each_other_and_keep_their_settings(actor, encoded):
    """A greedy call, drawn ones of other lengths, ends and temperatures, and passes of training, all at once."""
    calls = [
        {"max_new_tokens": 3 + number, "do_sample": number % 3 > 0, "seed": number, "temperature": 0.5 + number}
        for number in range(6)
    ]
    expected = [actor.generate(**encoded, **call) for call in calls]
    labels = encoded["input_ids"]
    loss = actor.train()(**encoded, labels=labels).loss.detach()
    found: dict = {}

    def run(number: int) -> None:
        for _ in range(3):
            found[number] = actor.generate(**encoded, **calls[number])
            assert torch.equal(found[number], expected[number])
            assert torch.equal(actor(**encoded, labels=labels).loss.detach(), loss)
            assert actor.training

    failed: list = []
    threads = [threading.Thread(target=_kept(run, failed), args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(found) == len(calls)


def _kept(function, failed):
    def run(*args):
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    return run


def test_weights_that_another_thread_writes_while_responses_are_drawn_are_noticed(actor, encoded):
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    actor(input_ids=encoded["input_ids"], labels=encoded["input_ids"]).loss.backward()
    passes: list = []

    def step_in_the_midst(*_):
        passes.append(1)
        if len(passes) == 6:
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()

    handle = actor.model.register_forward_pre_hook(step_in_the_midst)
    with pytest.raises(RolloutError, match="the weights were changed during generation"):
        actor.generate(**encoded, **ASKED)
    handle.remove()
    assert torch.equal(actor.generate(**encoded, **ASKED), actor.model.generate(**encoded, **ASKED))
