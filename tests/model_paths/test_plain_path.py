"""A model that would be wrong on a fast way of running it takes a plain one, on which its numbers are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_paths.families import FAST
from random_models import save_random_model
from refusals import refusal
from roles import experience, gap_from_plain_rows, start_actor, start_critic

from verl.component import component
from verl.model_paths.check import paths_for
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout


@component
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


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_model_that_ignores_its_mask_or_its_positions_is_run_without_padding(family, ignored, saved, prompts, caplog):
    actor = start_actor(Ignoring(path=saved(family), ignored=ignored), HFRollout(max_new_tokens=7))
    rows = experience(actor, prompts())
    assert len(set(rows["prompt_mask"].sum(1).tolist())) > 1
    assert gap_from_plain_rows(actor, rows, "rollout_log_probs", "old_log_probs") < 1e-4
    assert actor.engine.paths(rows) == paths_for(actor.model, 30) != FAST
    told = [record.message for record in caplog.records if "takes a plain path" in record.message]
    assert len(told) == 1
    assert "its forward was replaced on the object" in told[0]
    assert actor.update(rows)["grad_norm"] > 0
    critic = start_critic(Ignoring(path=saved(family), ignored=ignored))
    critic.compute_values(rows)


def test_what_sees_the_future_and_what_has_an_encoder_is_refused_by_name(saved):
    with refusal("actor.model"):
        start_actor(Pretrained(path=saved("bert")))
    start_actor(Pretrained(path=saved("bert", is_decoder=True)))
    directory = saved("qwen2")
    config = json.loads((Path(directory) / "config.json").read_text())
    (Path(directory) / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    for start, role in ((start_actor, "actor"), (start_critic, "critic")):
        with refusal(f"{role}.model.path"):
            start(Pretrained(path=directory))
    model = Pretrained(path=saved("gpt2")).load_causal_lm("cpu")
    model.config.is_encoder_decoder = True
    with refusal("m"):
        paths_for(model, 10, "m")


def test_looking_draws_no_random_number_and_leaves_the_model_as_it_was(model32):
    model = model32.load_causal_lm("cpu")
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    assert paths_for(model, 30) == FAST
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(x.requires_grad is False for x in model.parameters())
