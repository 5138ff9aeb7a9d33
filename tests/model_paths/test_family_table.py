"""A model takes the paths that its family was tried on, and plain ones if anything that matters is another."""

import copy
from typing import Any

import pytest
import torch
from cases import exhaustive
from model_paths.families import FAST, plain_model, save_family
from refusals import refusal, refused
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from verl.model_paths import check
from verl.model_paths.check import finding_for, paths_for
from verl.model_paths.families import PLAIN, UNTRIED, family_table
from verl.models.model_stats import known_shapes
from verl.models.structure import call_model
from verl.models.tiny import TinyModel

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
WINDOWED = {"mistral": "sliding_window", "gemma3_text": "sliding_window", "llama4_text": "attention_chunk_size"}
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_parameters": {**ROPE, "rope_type": "dynamic"}, "max_position_embeddings": 40}


def small(family: str, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    torch.manual_seed(0)
    attention = settings.pop("attention", "sdpa")
    config = CONFIG_MAPPING[family](**{**SMALL, **settings})
    config._attn_implementation = attention
    return (kind.from_config(config) if kind is AutoModelForCausalLM else kind(config)).eval()


def test_common_models_and_the_embedded_one_take_the_fast_paths():
    gemma2 = {name for name in known_shapes() if name.startswith("google/gemma-2-")}  # caps scores: eager attention
    for name, shape in known_shapes().items():
        with torch.device("meta"):
            config = CONFIG_MAPPING[shape["model_type"]](**{**shape, "num_hidden_layers": 2})
            model = AutoModelForCausalLM.from_config(config)
        if name in gemma2:
            with refusal("model"):
                paths_for(model, 4096)
        else:
            assert paths_for(model, 4096) == FAST, name
    assert paths_for(TinyModel().load_causal_lm("cpu"), 40) == FAST
    assert paths_for(small("llama", **DYNAMIC), 40) == FAST  # up to the length at which frequencies change


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "ntk_by_parts"}}, "rotary positions of the kind ntk_by"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layers of the kind linear_attention"),
    ],
)
def test_a_configuration_that_was_not_tried_takes_plain_paths(family, settings, reason):
    config = CONFIG_MAPPING[family](**SMALL)
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    record = check.record_for(config, LlamaForCausalLM)
    assert isinstance(record, str)
    assert reason in record


class OwnLlama(LlamaForCausalLM):
    """A class that is not of transformers."""


class OwnWithoutCache(OwnLlama):
    def forward(self, *given: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        if past_key_values is not None:
            raise ValueError("no cache")
        return super().forward(*given, **inputs)


def test_an_own_class_is_padded_and_uses_its_own_cache_where_that_is_right(caplog):
    paths = paths_for(small("llama", OwnLlama), 30)
    assert (paths.scoring, paths.cache, paths.own_attention) == (UNTRIED.scoring, "own", False)
    assert "OwnLlama takes a plain path" in caplog.text
    assert "OwnLlama is no class of transformers" in caplog.text
    assert paths_for(small("llama", OwnWithoutCache), 30).cache == "none"


def adding(name: str, more: Any) -> type:
    """A model that adds this function of its logits to them."""

    def forward(model: Any, *given: Any, **inputs: Any) -> Any:
        output = OwnLlama.forward(model, *given, **inputs)
        output.logits = output.logits + more(output.logits)
        return output

    return type(name, (OwnLlama,), {"forward": forward})


Later = adding("Later", lambda logits: logits.mean(dim=1, keepdim=True))  # each token sees those that come after it
Drawing = adding("Drawing", lambda logits: torch.randn(1))  # other numbers in each forward pass
Mixing = adding("Mixing", lambda logits: logits.mean(dim=0, keepdim=True))  # rows depend on those beside them


def paths(family, kind=AutoModelForCausalLM, tokens=30, **settings):
    return lambda: paths_for(small(family, kind, **settings), tokens)


test_what_no_path_is_right_for_is_refused_by_name = refused(
    ("model", check.NOT_A_POLICY, paths("llama", Later)),
    ("model", check.NOT_REPEATABLE, paths("llama", Drawing)),
    ("model", check.BATCH_DEPENDENT, paths("llama", Mixing)),
    ("model", check.NOT_A_POLICY, paths("llama", is_causal=False)),
    ("model", check.NOT_A_POLICY, paths("gemma3_text", use_bidirectional_attention=True)),
    ("model", check.LEFT_OUT_BY_SDPA, paths("gemma2")),
    ("model", "(max_position_embeddings 40)", paths("llama", tokens=41, **DYNAMIC)),
)


def test_eager_attention_leaves_out_packed_rows():
    eager = paths_for(small("qwen2", attention="eager"), 30)
    assert (eager.scoring, eager.cache, eager.own_attention) == ("padded", "in_place", False)
    assert paths_for(small("gemma2", attention="eager"), 30).scoring == "padded"


def test_a_finding_is_kept_until_the_configuration_changes_or_it_is_forgotten(monkeypatch):
    calls, find = [], check._find
    monkeypatch.setattr(check, "_find", lambda model: calls.append(model) or find(model))
    model = small("llama")
    for tokens in (30, 60):
        paths_for(model, tokens)
    assert len(calls) == 1
    model.config.attention_dropout = 0.5
    paths_for(model, 30)
    assert len(calls) == 2
    check.forget(model)
    paths_for(model, 30)
    assert len(calls) == 3


def test_an_attention_that_was_not_tried_takes_the_plain_path():
    model = small("llama")
    model.config._attn_implementation = "flex_attention"
    paths = finding_for(model).paths
    assert (paths.scoring, paths.cache, paths.reasons) == (
        PLAIN.scoring, PLAIN.cache, ("its attention is flex_attention",)
    )  # fmt: skip


@pytest.mark.parametrize("family", WINDOWED)
def test_the_small_models_of_the_tests_tell_a_window_that_is_one_token_off(family, tmp_path):
    model = plain_model(save_family(tmp_path, family), "eager")
    other = copy.deepcopy(model.config)
    setattr(other, WINDOWED[family], getattr(other, WINDOWED[family]) + 1)
    moved = type(model)(other).eval()
    moved.load_state_dict(model.state_dict())
    moved.set_attn_implementation("eager")
    ids = torch.randint(20, 100, (1, 100), generator=torch.Generator().manual_seed(0))
    logits = [call_model(x, input_ids=ids, use_cache=False).logits.log_softmax(-1) for x in (model, moved)]
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3


def test_every_record_names_paths_of_the_table_or_says_why_there_are_none():
    table = family_table()
    records = [record for records in table.families.values() for record in records]
    assert len(records) > 170
    assert all((record.paths in table.paths) is not bool(record.refusal or record.fault) for record in records)
    names = [record.paths for record in records if record.paths]
    assert set(names) == table.paths.keys()
    longest = {(family, x.longest) for family, records in table.families.items() for x in records if x.longest}
    assert all(getattr(CONFIG_MAPPING[family](), entry) > 1 for family, entry in longest)


@pytest.mark.parametrize("family", ["mpt", "gpt2", *exhaustive("opt", "gptj", "openai-gpt", "bart", "whisper")])
def test_rows_beyond_the_positions_that_a_model_has_are_refused_before_it_is_called(family):
    entry = next(record.longest for record in family_table().families[family] if record.longest)
    config = CONFIG_MAPPING[family](**{entry: 40, "vocab_size": 64, "pad_token_id": 0})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert paths_for(model, 40).scoring
    with refusal("model"):
        paths_for(model, 41)
    assert check.tail_for(model, 40) == 0 < check.tail_for(model, 30)


def test_other_versions_than_the_tried_ones_are_told_once_and_a_build_is_no_other_version(monkeypatch, caplog):
    models = [TinyModel(hidden_size=32, intermediate_size=64).load_causal_lm("cpu") for _ in range(2)]
    tried = check.family_table().versions
    check._tell_versions.cache_clear()
    for build, num_told in (("+cpu", 0), (".1", 1)):
        monkeypatch.setattr(check, "installed", lambda name, build=build: tried[name] + build)
        with caplog.at_level("INFO"):
            for model in models:
                check.forget(model)
                check.finding_for(model)
        assert caplog.text.count(f"torch {tried['torch']}.1") == num_told


def test_a_save_does_not_change_the_finding_for_a_model(tmp_path):
    model = TinyModel(hidden_size=32, intermediate_size=64).load_causal_lm("cpu")
    finding = check.finding_for(model)
    model.save_pretrained(tmp_path)
    assert model.config.architectures
    assert check.finding_for(model) is finding
