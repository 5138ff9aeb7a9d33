"""Families of models other than our own: each generates, scores, is valued and trains through the same code."""

import pytest
import torch
from cases import exhaustive, short_where
from random_models import save_random_model
from roles import experience, largest_difference, start_actor, start_critic, weights

from verl.models.pretrained import Pretrained
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout

EXACT = ["gpt_neox", "gpt2", "opt", "phi"]  # layer norms stay in float64
ROUNDED = ["qwen2", "llama", "phi3", "mistral", "olmo2", "qwen3"]  # RMS norms pass through float32
SINGLE = [("gemma2", "eager"), ("bloom", "eager"), ("qwen3_moe", "sdpa")]


def check(source, prompts, bound):
    actor = start_actor(source, HFRollout(max_new_tokens=7))
    rows = experience(actor, prompts())
    torch.testing.assert_close(rows["rollout_log_probs"], rows["old_log_probs"], rtol=0, atol=bound)
    apart = HFRollout(max_new_tokens=7, max_rows=1, share_prefix=False, drop_finished=False)
    assert torch.equal(
        start_actor(source, apart).generate(prompts(), GenerationRequest(0, 3))["responses"], rows["responses"]
    )

    before = weights(actor.model)
    assert actor.update(rows)["grad_norm"] > 0
    assert largest_difference(weights(actor.model), before) > 0

    critic = start_critic(source, micro_batch_tokens=40)
    assert not critic.compute_values(rows)["values"].any()
    assert critic.update(rows)["grad_norm"] > 0
    assert critic.compute_values(rows)["values"].any()


@pytest.mark.slow
@pytest.mark.parametrize("family", short_where([*EXACT, *ROUNDED], {"gpt2", "qwen3"}.__contains__))
def test_a_family_works_in_float64(family, prompts, tmp_path):
    save_random_model(tmp_path, family, torch.float64)
    check(Pretrained(path=str(tmp_path), dtype="float64"), prompts, 1e-10 if family in EXACT else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), SINGLE)
def test_a_family_works_in_float32(family, attention, prompts, tmp_path):
    save_random_model(tmp_path, family, torch.float32)
    check(Pretrained(path=str(tmp_path), attention=attention), prompts, 1e-4)


@pytest.mark.parametrize("family", [*exhaustive("mistral"), "gemma3_text"])
def test_a_sliding_window_narrower_than_the_text_works(family, prompts, tmp_path):
    save_random_model(tmp_path, family, torch.float64, sliding_window=5)
    check(Pretrained(path=str(tmp_path), dtype="float64"), prompts, 1e-6)
