"""Every family of causal language models is right on the path that it takes, or refused by name."""

import re

import pytest
from cases import short_where
from model_paths.families import SMALL, families, largest_gaps, names, save_family, start_family

from verl.errors import ConfigError
from verl.model_paths.families import family_table

TOLERANCE = 1e-4  # nats
NOT_BUILT = {  # by transformers itself, from a configuration alone: a part of the reason
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "has no attribute 'vocab_size'",  # reads the states of another model
    "gemma4_unified_assistant": "has no attribute 'vocab_size'",
    "musicgen": "Validation error for field 'text_encoder'",  # draws codes of sound
    "musicgen_melody": "Validation error for field 'text_encoder'",
}
SEES_THE_FUTURE = "each token sees those that come after it"
LENGTH_MATTERS = "the numbers of a token change with the length of its row once that exceeds a limit"
RIGHT = (  # one of each class of models that were wrong, or died, on a way that was taken without looking
    "llama4_text",  # chunks, and positions counted along a line
    "phimoe",  # sliding windows that the mask alone tells of
    "qwen2_moe",
    "diffllama",  # values of another width than the cache has
    "hrm_text",
    "deepseek_v3",
    "gemma3n_text",  # layers that share keys and values
    "mamba",  # states
    "qwen3_next",
    "lfm2",
    "phi3 longrope, short rows",
    "bart",  # positions of its own
    "bert decoder",
)
REFUSED = {
    "phi3 longrope": rf"Phi3ForCausalLM: {LENGTH_MATTERS} \(original_max_position_embeddings 40",
    "llama dynamic": rf"LlamaForCausalLM: {LENGTH_MATTERS} \(max_position_embeddings 40\)",
    "bert": f"BertLMHeadModel: {SEES_THE_FUTURE}",
}
REASONS = re.compile(
    rf"is a \w+: ({SEES_THE_FUTURE}|{LENGTH_MATTERS})|transformers has no AutoModelForCausalLM for a \w+TextConfig"
)


SHORT = {"llama4_text", "qwen2_moe", "mamba", "phi3 longrope, short rows", "bart"}


@pytest.mark.slow
@pytest.mark.parametrize("name", short_where(RIGHT, SHORT.__contains__))
def test_a_model_is_right_on_the_path_that_it_takes(name, tmp_path):
    path = save_family(tmp_path / "model", name)
    actor = start_family(path)
    gaps = largest_gaps(actor, path)
    assert max(gaps.values()) < TOLERANCE, (gaps, actor.engine.paths)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_no_path_is_right_for_is_refused_by_name(name, tmp_path):
    path = save_family(tmp_path / "model", name)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        largest_gaps(start_family(path), path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in names() if name not in NOT_BUILT])
def test_every_family_is_right_or_refused_by_name(name, tmp_path):
    path = save_family(tmp_path / "model", name)
    try:
        gaps = largest_gaps(start_family(path), path)
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert REASONS.search(refusal), refusal
        return
    assert max(gaps.values()) < TOLERANCE, gaps


def test_the_table_has_every_family_of_the_installed_transformers():
    table = family_table().families
    assert set(families()) <= table.keys()
    assert {name for name, records in table.items() if records[0].fault is not None} == {*NOT_BUILT, "qwen4_exp"}


@pytest.mark.exhaustive
def test_all_but_a_few_families_can_be_built(tmp_path):
    assert len(families()) - len(NOT_BUILT) >= 110
    assert not NOT_BUILT.keys() & SMALL.keys()
    for name, reason in NOT_BUILT.items():
        with pytest.raises(Exception, match=reason):
            save_family(tmp_path / name, name)
