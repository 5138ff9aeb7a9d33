"""Batches that rewards are given in tests, and reward models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.component import BuildContext
from verl.models.pretrained import Pretrained
from verl.models.tiny import character_tokenizer
from verl.protocol import DataProto
from verl.rewards.reward_model import ModelReward, RewardModel

PROMPTS = ["1+2=", "what is 6*7? ", "9-", "34+5="]
RESPONSES = ["3", "42 is it", "", "is this not 39?"]


def batch_of(responses: Iterable[str], **columns: Any) -> DataProto:
    """Responses of two tokens each to the prompts `prompt 0`, `prompt 1`, ..."""
    texts = list(responses)
    arrays = {name: np.array([None, *values], dtype=object)[1:] for name, values in columns.items()}
    return DataProto.from_dict(
        tensors={"response_mask": torch.ones(len(texts), 2, dtype=torch.bool)},
        non_tensors={"prompt_text": [f"prompt {i}" for i in range(len(texts))], "response_text": texts, **arrays},
    )


def rollout(prompts: list[str] = PROMPTS, responses: list[str] = RESPONSES, **columns: list) -> DataProto:
    """What the rollout gives the reward: prompts padded on the left, responses with <eos> on the right."""
    tokenizer = character_tokenizer()
    asked = tokenizer(prompts, padding=True, return_tensors="pt")
    tokenizer.padding_side = "right"
    said = tokenizer([f"{text}<eos>" for text in responses], padding=True, return_tensors="pt")
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.cat([asked["input_ids"], said["input_ids"]], dim=1),
            "attention_mask": torch.cat([asked["attention_mask"], said["attention_mask"]], dim=1),
            "responses": said["input_ids"],
            "response_mask": said["attention_mask"].bool(),
        },
        non_tensors={"prompt_text": prompts, "response_text": responses, **columns},
    )


def described(path: str | Path, family: str = "", **options: Any) -> RewardModel:
    """The description of the model at a path; Gemma 2 needs eager attention."""
    return RewardModel(model=Pretrained(path=str(path), attention="eager" if family == "gemma2" else "sdpa"), **options)


def built(path: str | Path, family: str = "", **options: Any) -> ModelReward:
    """The running form, beside a policy with the character tokenizer."""
    return described(path, family, **options).build_unscaled(BuildContext(tokenizer=character_tokenizer()))
