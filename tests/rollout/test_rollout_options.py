"""What is wrong with the options of a rollout is said by field, and what ends a response is known beforehand."""

import copy

from refusals import refusal

from verl.rollout.base import stop_tokens


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
    tokenizer = copy.copy(tokenizer)  # as a base model's, whose text ends otherwise than a turn of its template
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<system>\n{% endfor %}"
    assert stop_tokens(model, tokenizer, (7,)).tolist() == [1, tokenizer.convert_tokens_to_ids("<system>"), 7]
