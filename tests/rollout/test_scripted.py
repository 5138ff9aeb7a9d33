"""The scripted rollout: given texts, with the log-probabilities that the model gives them."""

import torch
from roles import start_actor

from verl.rollout.base import GenerationRequest
from verl.rollout.scripted import ScriptedRollout


def texts_of(rows, tokenizer):
    return [
        tokenizer.decode(r[m].tolist(), skip_special_tokens=True)
        for r, m in zip(rows["responses"], rows["response_mask"], strict=True)
    ]


def test_each_sample_of_each_prompt_has_its_own_line(model64, prompts, tokenizer):
    actor = start_actor(model64, ScriptedRollout(texts=("one", "two", "three", "four", "five"), max_new_tokens=10))
    rows = actor.generate(prompts("a", "bcd", "e", ids=[0, 1, 2]), GenerationRequest(0, 2)).check(strict=True)
    assert texts_of(rows, tokenizer) == ["one", "two", "three", "four", "five", "one"]
    ends = rows["responses"].gather(1, rows["response_mask"].sum(dim=1, keepdim=True) - 1)
    assert ends.flatten().tolist() == [tokenizer.eos_token_id] * 6
    backwards = actor.generate(prompts("a", "b", ids=[2, 0]), GenerationRequest(0, 1))  # by number, not by place
    assert texts_of(backwards, tokenizer) == ["three", "one"]
    assert len(actor.generate(prompts()[:0], GenerationRequest(0, 2))) == 0


def test_log_probs_are_the_models_own(model64, prompts):
    actor = start_actor(model64, ScriptedRollout(texts=("1", "a longer line"), max_new_tokens=12, temperature=0.7))
    rows = actor.generate(prompts(), GenerationRequest(0, 2))
    assert rows["rollout_log_probs"][rows["response_mask"]].max() < 0
    found = actor.compute_log_probs(rows)["old_log_probs"]
    torch.testing.assert_close(rows["rollout_log_probs"], found, rtol=0, atol=1e-10)


def test_a_line_that_is_too_long_is_cut_and_has_no_end(model64, prompts, tokenizer):
    actor = start_actor(model64, ScriptedRollout(texts=("abcdefgh", "abcd", "abc"), max_new_tokens=4))
    rows = actor.generate(prompts("x", "y", "z"), GenerationRequest(0, 1))
    assert texts_of(rows, tokenizer) == ["abcd", "abcd", "abc"]
    assert rows["responses"][:, -1].tolist() == [*tokenizer("dd")["input_ids"], tokenizer.eos_token_id]
