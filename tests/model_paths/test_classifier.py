"""The score of a text is that of the text alone, whatever is scored beside it, and before it."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import short_where
from random_models import save_random_classifier
from refusals import refusal
from rewards.rated import rollout
from transformers import AutoModelForSequenceClassification

from verl.component import BuildContext
from verl.models import heads
from verl.models.pretrained import Pretrained
from verl.models.tiny import character_tokenizer
from verl.rewards.reward_model import ModelReward, RewardModel

TURNS = {"rope_theta": 10000.0, "factor": 4.0}
LONGEST = {"original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, **LONGEST}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, **LONGEST}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", **TURNS}, "max_position_embeddings": 16}),
}
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **TURNS, **LONGEST}}),
    "window": ("mistral", {"sliding_window": 8}),
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "deberta": ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": ("modernbert", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
}
PROMPTS = ["1+2=", "what is 6*7? ", "9-", "34+5=", "what is it that "]
RESPONSES = ["3", "42 is it", "", "is this not 39? and what if it is more", "3+4"]
BATCHES = [0, 1, 2, 3, 4], [3], [4, 1], [0, 3], [1]  # of 6, 22, 3, 44 and 20 tokens
EAGER = ("deberta-v2",)


def alone(path: Path, ids: list[int]) -> float:
    """The score that a model just loaded gives a text."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


def largest_gap(path: Path, family: str) -> float:
    """Of scores in batches, one after another, from those of each text alone."""
    model = Pretrained(path=str(path), attention="eager" if family in EAGER else "sdpa")
    reward = RewardModel(model=model, reads="tokens", max_length=64)
    running, worst = reward.build(BuildContext(tokenizer=character_tokenizer())), 0.0
    for chosen in BATCHES:
        batch = rollout([PROMPTS[i] for i in chosen], [RESPONSES[i] for i in chosen])
        texts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        expected = np.array([alone(path, ids.tolist()) for ids in texts])
        worst = max(worst, float(np.abs(running.score_batch(batch).scores - expected).max()))
    return worst


@pytest.mark.parametrize("name", short_where(BY_LENGTH, "dynamic".__eq__))
def test_texts_that_would_change_the_frequencies_of_others_are_scored_by_length(name, tmp_path, caplog):
    family, options = BY_LENGTH[name]
    path = save_random_classifier(tmp_path / family, family, **options)
    assert largest_gap(path, family) < 1e-4
    told = [record.message for record in caplog.records if "takes a plain path" in record.message]
    assert len(told) == 1
    assert "texts are scored with others of their length only" in told[0]


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("name", short_where(TOGETHER, {"deberta", "bert"}.__contains__))
def test_texts_of_encoders_and_other_decoders_are_scored_together(name, tmp_path, caplog):
    family, options = TOGETHER[name]
    path = save_random_classifier(tmp_path / family, family, **options)
    assert largest_gap(path, family) < 1e-4
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name.startswith("verl")
    ]


def started(path: Path) -> ModelReward:
    reward = RewardModel(model=Pretrained(path=str(path)), reads="tokens", max_length=64)
    return reward.build_unscaled(BuildContext(tokenizer=character_tokenizer()))


def rate(running: ModelReward, chosen: list[int]) -> None:
    running.score_batch(rollout([PROMPTS[i] for i in chosen], [RESPONSES[i] for i in chosen]))


def test_texts_below_the_length_at_which_frequencies_change_are_scored_together(tmp_path):
    family, options = BY_LENGTH["longrope"]
    running = started(save_random_classifier(tmp_path / family, family, **options))
    rate(running, [0, 2])  # of 6 and 3 tokens
    assert running._pads
    rate(running, [0, 1])
    assert not running._pads


def test_a_model_whose_scores_depend_on_what_was_scored_before_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "forget_lengths", lambda rotary: None)
    family, options = BY_LENGTH["dynamic"]
    running = started(save_random_classifier(tmp_path / family, family, **options))
    with refusal("model", value="scored before it"):
        rate(running, [2, 1, 3])


@pytest.mark.parametrize(("dims", "kept"), [(1, True), (0, False)])
def test_a_model_that_looks_at_padding_or_other_texts_is_noticed_in_the_first_batch(dims, kept, tmp_path, caplog):
    running = started(save_random_classifier(tmp_path / "mistral", "mistral"))
    assert running.model is not None
    layer = running.model.classifier.model.layers[0].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) + x.mean(dim=dims, keepdim=True)  # of a row with its padding, or of a batch
    if not kept:
        with refusal("model", value="scored with it"):
            rate(running, [0, 1, 3])
        return
    rate(running, [0, 1, 3])
    assert not running._pads
    assert "texts are scored with others of their length only" in caplog.text
