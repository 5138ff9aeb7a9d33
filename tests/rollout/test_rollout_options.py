"""What is wrong with the options of a rollout is said by field, and what ends a response is known beforehand."""

from __future__ import annotations

import pytest
from refusals import refusal

from verl.errors import ConfigError
from verl.rollout.base import stop_tokens
from verl.rollout.hf import HFRollout
from verl.rollout.scripted import ScriptedRollout


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"temperature": 0.0}, "temperature is 0.0: must be above 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens is 5: must lie between 0 and max_new_tokens 4"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"share_prefix": "yes"}, "share_prefix is 'yes': expected true or false"),
    ],
)
def test_a_fault_names_its_field(options, fault):
    with pytest.raises(ConfigError, match=fault):
        HFRollout(**options)


def test_a_script_needs_a_text():
    with refusal("texts"):
        ScriptedRollout(texts=())


def test_a_stop_token_that_the_model_does_not_have_is_refused(model32, tokenizer):
    with refusal("rollout.stop_token_ids"):
        stop_tokens(model32.load_causal_lm("cpu"), tokenizer, (7, 100_000))


def test_stop_tokens_are_those_of_model_tokenizer_and_run(model32, tokenizer):
    model = model32.load_causal_lm("cpu")
    assert stop_tokens(model, tokenizer, ()).tolist() == [1]
    model.generation_config.eos_token_id = [9, 4]
    assert stop_tokens(model, tokenizer, (7, 4)).tolist() == [1, 4, 7, 9]
    model.generation_config.eos_token_id = None
    assert stop_tokens(model, tokenizer, (7,)).tolist() == [1, 7]
