"""A model that sees the padding to the left of a text is refused by name; every other family passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random_model
from roles import start_actor, start_critic

from verl.errors import ConfigError
from verl.models.padding import LONG, TOLERANCES, refuse_padding_blind
from verl.models.pretrained import Pretrained


@dataclass(frozen=True, kw_only=True)
class Ignoring(Pretrained):
    """A model that sees every token, or counts positions from the first, as many a hand-written one does."""

    ignored: str = "attention_mask"

    def load_causal_lm(self, device: str) -> Any:
        return self._without(super().load_causal_lm(device))

    def load_backbone(self, device: str) -> Any:
        return self._without(super().load_backbone(device))

    def _without(self, model: Any) -> Any:
        forward = model.forward

        def blind(input_ids: Any, **inputs: Any) -> Any:
            counted = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            in_place = torch.ones_like(input_ids) if self.ignored == "attention_mask" else counted
            return forward(input_ids=input_ids, **{**inputs, self.ignored: in_place})

        model.forward = blind
        return model


@pytest.fixture
def saved(tmp_path: Path):
    def save(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        return str(save_random_model(tmp_path / family, family, dtype, **options))

    return save


def test_a_model_that_ignores_the_attention_mask_is_refused_as_actor_and_as_critic(saved):
    source = Ignoring(path=saved("qwen2"))
    with pytest.raises(ConfigError, match=r"^actor\.model is a Qwen2ForCausalLM: .*padded on the left .*% off"):
        start_actor(source)
    with pytest.raises(ConfigError, match=r"^critic\.model is a Qwen2Model: "):
        start_critic(source)


def test_learned_positions_that_are_ignored_are_refused_and_relative_ones_do_no_harm(saved):
    gpt2, qwen2 = Ignoring(path=saved("gpt2"), ignored="position_ids"), saved("qwen2")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        start_actor(gpt2)
    start_actor(Ignoring(path=qwen2, ignored="position_ids"))  # distances are all that its rotations know
    start_actor(Pretrained(path=gpt2.path))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mistral", "gpt_neox"])
def test_rounding_in_any_dtype_passes_and_a_blind_model_does_not(family, dtype, saved):
    path = saved(family)
    good, blind = Pretrained(path=path, dtype=dtype), Ignoring(path=path, dtype=dtype)
    refuse_padding_blind(good.load_causal_lm("cpu"), "m")
    refuse_padding_blind(good.load_backbone("cpu"), "m")
    with pytest.raises(ConfigError, match=r"^m is a "):
        refuse_padding_blind(blind.load_causal_lm("cpu"), "m")
    assert getattr(torch, dtype) in TOLERANCES


def test_trying_draws_no_random_number_and_leaves_the_model_as_it_was(model32):
    model = model32.load_causal_lm("cpu")
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    refuse_padding_blind(model, "m")
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_context_too_short_for_the_trial_is_let_pass(model32):
    model = model32.load_causal_lm("cpu")
    model.config.max_position_embeddings = LONG - 1
    refuse_padding_blind(model, "m")
