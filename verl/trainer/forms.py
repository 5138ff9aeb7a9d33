"""Which form an object of the user has, and the description that stands for it: models, rewards, data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from verl.data.base import PromptOptions, PromptSource
from verl.data.files import PromptFiles
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError, faults_below
from verl.models.interfaces import check_interface
from verl.models.pretrained import ModelSource, Pretrained
from verl.rewards.base import Reward, RewardDescription
from verl.rewards.function import RewardFunction
from verl.rewards.reward_model import RewardModel
from verl.rewards.weighted_sum import TAKEN, WeightedSum
from verl.trainer.given import GivenModel, GivenPrompts, GivenReward, carrying

REWARDS = (
    "a function of prompts and responses, `file.py:function`, a reward model (a module, or the path of one), or a "
    "description such as ExactMatch()"
)
PART_KEYS = ("reward", "weight", "name")


def described_model(argument: str, model: Any, tokenizer: Any = None) -> ModelSource:
    """A model that is a path, a hub name, a description, or loaded.

    Raises:
        ConfigError: it is none of them, or lacks what its role needs.
    """
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, (str, Path)):
        with faults_below(argument):
            return Pretrained(path=str(model))
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"{argument} is a {type(model).__name__}: expected a Hugging Face model, or the path or hub name of one."
        )
    if argument != "critic_model":
        check_interface("actor", model, argument)
    with faults_below(argument):
        return carrying(GivenModel.of(argument, model), (model, tokenizer))


def described_reward(reward: Any, tokenizer: Any = None, argument: str = "reward_model") -> RewardDescription:
    """A reward in any form.

    Args:
        tokenizer: of a reward model that is passed as a module; None is that of the policy.
    Raises:
        ConfigError: it is no reward.
    """
    if isinstance(reward, RewardDescription):
        return reward
    if isinstance(reward, (str, Path)):
        with faults_below(argument):
            if re.search(r":\w+$", str(reward)):
                return RewardFunction(path=str(reward))
            return RewardModel(model=Pretrained(path=str(reward)))
    if isinstance(reward, type):
        raise ConfigError(f"{argument} is the class {reward.__name__}: expected {REWARDS}. Give one of its objects.")
    if not isinstance(reward, (Reward, nn.Module)) and not callable(reward):
        raise ConfigError(f"{argument} is {reward!r}: expected {REWARDS}.")
    name = getattr(reward, "__qualname__", type(reward).__name__)
    return carrying(GivenReward(name=name), (reward, tokenizer))


def summed_rewards(rewards: Sequence[Any]) -> RewardDescription:
    """Several rewards as their weighted sum; one of weight 1 as itself.

    Args:
        rewards: each in any form, or `{"reward": ..., "weight": 0.5, "name": "style"}`. The weight is 1 unless given.
    Raises:
        ConfigError: there is none, or one of them is no reward.
    """
    parts: dict[str, RewardDescription] = {}
    weights: dict[str, float] = {}
    for index, item in enumerate(rewards):
        part = dict(item) if isinstance(item, Mapping) else {"reward": item}
        argument = f"reward_models[{index}]"
        if unknown := [key for key in part if key not in PART_KEYS]:
            raise ConfigError(f"{argument}.{unknown[0]} is not a known key. Known: {', '.join(PART_KEYS)}.")
        if "reward" not in part:
            raise ConfigError(f"{argument}.reward is missing: expected {REWARDS}.")
        described = described_reward(part["reward"], argument=argument)
        name = part.get("name") or _part_name(part["reward"], index, parts)
        if isinstance(described, GivenReward):
            described = carrying(dataclasses.replace(described, name=name), described._carried)  # type: ignore[attr-defined]
        parts[name], weights[name] = described, part.get("weight", 1.0)
    if not parts:
        raise ConfigError("reward_models is empty: give at least one reward.")
    if len(parts) == 1 and next(iter(weights.values())) == 1:
        return next(iter(parts.values()))
    with faults_below("reward_models"):
        return WeightedSum(parts=dict(parts), weights=weights)


def described_data(train: Any, held_out: Any = None, options: PromptOptions | None = None) -> PromptSource:
    """Training data, and data to evaluate on: rows, a data set, a file, or a list of files.

    Raises:
        ConfigError: training data are files and the others rows, or there are none.
    """
    if isinstance(train, PromptSource):
        return train
    settings = dataclasses.asdict(options or PromptOptions())
    eval_files = _files(held_out)
    if (files := _files(train)) is not None:
        if held_out is not None and eval_files is None:
            raise ConfigError("eval_dataset has rows and train_dataset is a file: give both as rows, or both as files.")
        with faults_below("train_dataset"):
            return PromptFiles(train_files=files, eval_files=eval_files or (), **settings)
    if isinstance(train, RLHFDataset):
        settings |= dataclasses.asdict(train.options)
    if not hasattr(train, "__len__") or isinstance(train, Mapping):
        raise ConfigError(f"train_dataset is a {type(train).__name__}: expected rows, an RLHFDataset, or a file.")
    rows = None if eval_files is not None else held_out
    given = GivenPrompts(
        num_rows=len(train), num_eval_rows=0 if rows is None else len(rows), eval_files=eval_files or (), **settings
    )
    return carrying(given, (train, rows))


def _files(data: Any) -> tuple[str, ...] | None:
    """The paths that data are; None where they are no paths."""
    if isinstance(data, (str, Path)):
        return (str(data),)
    if isinstance(data, (list, tuple)) and data and all(isinstance(item, (str, Path)) for item in data):
        return tuple(map(str, data))
    return None


def _part_name(reward: Any, index: int, taken: Mapping[str, Any]) -> str:
    kind = reward.rpartition(":")[2] if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(kind)).lower()
    is_free = name.isidentifier() and name not in TAKEN and name not in taken
    return name if is_free else f"reward_{index + 1}"
