"""What is done to an actor between two calls is followed by the next one."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import exhaustive
from random_models import save_random_model

from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout

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


def end_otherwise(actor, source):
    free = actor.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    actor.model.generation_config.eos_token_id = int(free[0, -2])


CHANGES = [
    replace_model, replace_block, replace_parameter, replace_head, resize, tie, load, assign, wrap, wrap_and_disable,
    wrap_and_merge, inject, hook, end_otherwise, cast(torch.float16), cast(torch.bfloat16),
    cast(torch.float64),
]  # fmt: skip
IN_SHORT = (replace_block, resize, tie, wrap, wrap_and_disable, wrap_and_merge, hook)


@pytest.mark.first_rows(3)
@pytest.mark.parametrize("change", [*IN_SHORT, *exhaustive(*(x for x in CHANGES if x not in IN_SHORT), compile_it)])
def test_the_next_samples_are_those_of_the_changed_model(change, actor, source, encoded):
    actor.train()
    change(actor, source)
    expected = actor.model.eval().generate(**encoded, **ASKED, do_sample=False)
    actor.train()
    assert torch.equal(actor.generate(**encoded, **ASKED), expected)
    assert actor.training


def test_an_adapter_may_be_switched(actor, source, encoded):
    actor.model = with_adapter(actor.model)
    for switch in (actor.model.disable_adapter_layers, actor.model.enable_adapter_layers):
        switch()
        assert torch.equal(actor.generate(**encoded, **ASKED), actor.model.generate(**encoded, **ASKED))


def test_what_was_checked_of_a_model_is_checked_again_once_it_is_set(actor, source, encoded):
    plain = type(actor.model).forward

    def blind(*args, attention_mask=None, position_ids=None, **kwargs):
        return plain(actor.model, *args, **kwargs)

    actor.model.forward = blind
    actor.model = actor.model
    width = encoded["input_ids"].shape[1]
    together = actor.generate(**encoded, **ASKED)[:, width:]  # without padding, which this model would see
    for ids, mask, found in zip(encoded["input_ids"], encoded["attention_mask"], together, strict=True):
        text = ids[mask.bool()][None]
        alone = actor.generate(text, **ASKED)[0, text.shape[1] :]
        assert torch.equal(found[: len(alone)], alone)


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
    ]:
        with pytest.raises(ConfigError, match=told):
            actor.model = model
    assert torch.equal(actor.generate(**encoded, **ASKED), before)


def test_settings_of_generation_that_are_not_supported_are_told_once(actor, encoded, caplog):
    actor.model.generation_config.repetition_penalty = 1.5
    for _ in range(2):
        actor.generate(**encoded, **ASKED)
    assert caplog.text.count("has repetition_penalty=1.5, which is not supported here") == 1


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

    def run(number: int) -> None:
        for _ in range(3):
            assert torch.equal(actor.generate(**encoded, **calls[number]), expected[number])
            assert torch.equal(actor(**encoded, labels=labels).loss.detach(), loss)
            assert actor.training

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(run, range(len(calls))))
