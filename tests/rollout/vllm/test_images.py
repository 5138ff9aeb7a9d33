"""Prompts with images in vLLM: responses are those of our own loop, and weights of the vision tower are proven."""

from typing import Any

import pytest
import torch
from environments.picture_game import PictureGames
from image_models import save_image_model
from refusals import refusal
from rollout.vllm.test_families import outcomes
from same_training import compared, course
from trainer.runs import BRIEF_GRPO, fit, step_lines
from trainer.test_async_episodes import STOPS, playing

from verl.data.shapes import ShapesPrompts
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyImageText
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine_args import engine_args

pytestmark = pytest.mark.xdist_group("vllm")


def check(outcome: dict[str, Any]) -> None:
    assert "error" not in outcome, outcome
    assert min(outcome["same"]) >= 0.75  # of the 4 rows of a prompt alone; rounding may turn one
    assert sum(outcome["same"]) >= len(outcome["same"]) - 0.5
    assert max(outcome["gap"]) < 5e-4
    assert outcome["anew"] is None
    sent, changed, again, at_last = outcome["faults"]
    assert sent == again == []
    assert len(changed) == len(at_last) == outcome["tower"]


@pytest.mark.slow
def test_responses_to_images_are_those_of_our_own_loop_and_a_changed_tower_is_seen(tmp_path):
    found = outcomes(tmp_path, "images qwen2_5_vl", "images idefics3")
    for outcome in found.values():
        check(outcome)


@pytest.mark.exhaustive
def test_further_families_draw_the_same_responses_to_images(tmp_path):
    for outcome in outcomes(tmp_path, "images qwen3_vl", "images smolvlm").values():
        check(outcome)


MODEL = TinyImageText()
RUN: dict[str, Any] = {"data": ShapesPrompts(train_size=12, held_out=4), "total_steps": 2}


@pytest.mark.slow
def test_a_run_with_vllm_trains_as_one_with_hf(tmp_path):
    """The vision tower is trained too, and sent at each step."""
    engines = {"hf": HFRollout(max_new_tokens=6), "vllm": VLLMRollout(max_new_tokens=6, kv_cache_gib=0.02)}
    for name, engine in engines.items():
        fit(course(MODEL, tmp_path / name, BRIEF_GRPO, rollout=engine, **RUN), tmp_path / name / "run")
    ours, theirs = (compared(tmp_path / name) for name in engines)
    for line in step_lines(tmp_path / "vllm" / "run"):
        assert line["rollout/log_prob_gap_max_nats"] < 1e-4
        assert line["sync/unproven_tensors"] == 0
    start = MODEL.load_causal_lm("cpu").state_dict()
    assert all(torch.allclose(x, ours.weights[name], atol=2e-4) for name, x in theirs.weights.items())
    assert any("vision" in name and not torch.equal(x, start[name]) for name, x in theirs.weights.items())


@pytest.mark.slow
def test_turns_of_episodes_see_the_images_of_observations(tmp_path):
    rollout = VLLMRollout(max_new_tokens=6, kv_cache_gib=0.02, stop_token_ids=STOPS)
    options: dict[str, Any] = {**RUN, "environment": PictureGames(images=True, max_tokens=100, max_turns=3)}
    model = TinyImageText(context_length=160)
    fit(playing(model, tmp_path, rollout=rollout, mode="sync", max_staleness=1, **options), tmp_path / "run")
    for line in step_lines(tmp_path / "run"):
        assert line["episode/turns"] > 1
        assert line["rollout/log_prob_gap_max_nats"] < 1e-4


@pytest.mark.parametrize(("family", "name"), [("gemma3", "Gemma3"), ("qwen3_5", "Qwen3_5")])
def test_a_family_that_vllm_does_not_read_images_with_is_refused(family, name, tmp_path):
    source = Pretrained(path=str(save_image_model(tmp_path / "model", family, 32)), images=True)
    with refusal("actor.model", value=f"{name}ForConditionalGeneration"):
        engine_args(VLLMRollout(), source.load_causal_lm("cpu"), None, tmp_path)
