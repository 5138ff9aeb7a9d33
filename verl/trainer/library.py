"""Trainer: policy optimisation from a script or a notebook, with models, data and rewards passed as objects.

trainer = Trainer(model="Qwen/Qwen2-0.5B", reward_model=reward, train_dataset=rows, algorithm="grpo")
loss = trainer.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.checkpoint.config import Checkpointing
from verl.component import Description, as_plain, field_types
from verl.compose.build_trainer import build_trainer
from verl.compose.from_yaml import ComposedConfig, compose_over_default, read_short_file
from verl.compose.load_option import rollout_kind
from verl.compose.overrides import flatten
from verl.compose.suggestions import described, key_faults
from verl.compose.validate import validate
from verl.data.base import PromptOptions
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import ModelSource
from verl.trainer.face import TrainerFace
from verl.trainer.forms import described_data, described_model, described_reward
from verl.trainer.given import GivenModel, GivenPrompts, carried_in, hand_over
from verl.trainer.settings import PPOSettings
from verl.utils.component_exits import component_exits

PROMPTS_PER_STEP = 64  # at most, where nothing says how many
OF_ROLLOUT = ("engine", "n")  # keys of rollout_config beside those of the engine: which one, and responses per prompt
OF_TRAINING = {
    "lr": "actor.optimizer.lr",
    "critic_lr": "critic.optimizer.lr",
}  # keys of train_config that lie elsewhere


class Trainer(TrainerFace):
    """Policy optimisation over the composed default of `main_ppo.py`, by the same roles and the same loop.

    A model may be a path, a hub name, a description such as `TinyModel()`, or a loaded Hugging Face model; a loaded one
    is trained itself, so `model` is what it was, trained. Nothing is shown on the console but warnings.

    Args:
        model: the policy.
        reward_model: a function of prompts and responses, `file.py:function`, a reward model (a module that returns
            `scores`, a Hugging Face sequence-classification model, or the path of one), or a description.
        train_dataset: prompts: rows (dicts with a `prompt`), an `RLHFDataset`, a parquet or JSONL file, or several.
        ref_model: what KL is measured against, for algorithms that do; None is the policy as it starts.
        critic_model: what the critic starts from, for algorithms that need one; None is the policy as it starts.
        tokenizer: needed for a loaded model; else the one that lies with it.
        reward_tokenizer: of a reward model that is passed as a module and reads other tokens than the policy.
        eval_dataset: like `train_dataset`; None evaluates nothing.
        algorithm: an option of the group `algorithm`, or an `Algorithm`.
        rollout_config: keys of the rollout engine (`temperature`, `max_new_tokens`, ...), `n` responses per prompt, and
            `engine`, an option of the group `rollout`.
        checkpoint_config: keys of `Checkpointing` (`save_dir`, `save_interval`, `keep_last_n`, ...); None saves only
            where `save_checkpoint` is called.
        train_config: keys of `PPOSettings` (`total_steps`, `prompts_per_step`, `seed`, ...), `lr` and `critic_lr`.
        data_config: keys of `PromptOptions`.
        lora: train a low-rank adapter: a `LoRA`, or a mapping of its keys.
        config: a short YAML file or a mapping, laid over the default, below all arguments.
        overrides: as on the command line; they win over everything.

    Attributes:
        config: the composed configuration.

    Raises:
        ConfigError: every fault that can be found before any weight is loaded.
    """

    @component_exits()
    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        critic_model: Any = None,
        tokenizer: Any = None,
        train_dataset: Any = None,
        algorithm: str | Algorithm = "grpo",
        rollout_config: Mapping[str, Any] | None = None,
        checkpoint_config: Mapping[str, Any] | None = None,
        *,
        reward_tokenizer: Any = None,
        eval_dataset: Any = None,
        train_config: Mapping[str, Any] | None = None,
        data_config: Mapping[str, Any] | None = None,
        lora: LoRA | Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
    ):
        import rich

        _refuse_missing(model=model, reward_model=reward_model, train_dataset=train_dataset)
        _refuse_unknown_keys(rollout_config, checkpoint_config, train_config, data_config)
        self._reward_tokenizer = reward_tokenizer
        tokenizer = None if tokenizer is None else _padding(tokenizer)
        given: dict[str, Description] = {
            "actor.model": described_model("model", model, tokenizer),
            "reward": described_reward(reward_model, reward_tokenizer),
        }
        if ref_model is not None:
            given["reference.model"] = described_model("ref_model", ref_model, tokenizer)
        if critic_model is not None:
            given["critic.model"] = described_model("critic_model", critic_model, tokenizer)
        if lora is not None:
            given["actor.lora"] = described(LoRA, "lora", lora)
        room = _room(given["actor.model"], rollout_config, data_config)
        given["data"] = described_data(train_dataset, eval_dataset, described(PromptOptions, "data_config", room))
        if isinstance(algorithm, Algorithm):
            given["algorithm"] = algorithm
        below = _defaults(given, checkpoint_config is not None)
        above = _arguments(algorithm, rollout_config, checkpoint_config, train_config)
        composed = _compose(below, config, above, given, overrides)
        run = hand_over(validate(composed.config, composed.faults), carried_in(given))
        _refuse_unused(run, ref_model, critic_model)
        _refuse_objects_elsewhere(run, given)
        started = build_trainer(run, composed.config, overrides, rich.get_console(), tokenizer)
        self.config, self._closing = composed.config, started.closing
        self.run, self.run_dir, self.trainer = started.run, started.run_dir, started.trainer

    def _described_reward(self, reward: Any) -> Any:
        return described_reward(reward, self._reward_tokenizer)


def _refuse_missing(**arguments: Any) -> None:
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise ConfigError([f"{name} is missing. Give Trainer({name}=...)." for name in missing])


def _refuse_unknown_keys(
    rollout: Mapping[str, Any] | None,
    checkpoint: Mapping[str, Any] | None,
    train: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
) -> None:
    engine = rollout_kind((rollout or {}).get("engine", "hf"))
    known = {
        "rollout_config": (rollout, [*OF_ROLLOUT, *field_types(engine)]),
        "checkpoint_config": (checkpoint, field_types(Checkpointing)),
        "train_config": (train, [*OF_TRAINING, *field_types(PPOSettings)]),
        "data_config": (data, field_types(PromptOptions)),
    }
    faults = [fault for name, (given, keys) in known.items() for fault in key_faults(name, given or {}, keys)]
    if faults:
        raise ConfigError(faults)


def _defaults(given: Mapping[str, Description], saves: bool) -> dict[str, Any]:
    """What a library wants where nobody says otherwise: options of groups, and values by path."""
    data = given["data"]
    rows = data.num_rows if isinstance(data, GivenPrompts) else PROMPTS_PER_STEP
    return {
        "actor": "pretrained",
        "critic": "own_model" if "critic.model" in given else "same_as_actor",
        "checkpoint": "async" if saves else "off",
        "data": "files",  # not the lengths that suit the embedded example
        "tracker.console": None,
        "trainer.prompts_per_step": min(PROMPTS_PER_STEP, rows),
    }


def _arguments(
    algorithm: str | Algorithm,
    rollout: Mapping[str, Any] | None,
    checkpoint: Mapping[str, Any] | None,
    train: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments in the spelling of the configuration."""
    chosen: dict[str, Any] = {} if isinstance(algorithm, Algorithm) else {"algorithm": algorithm}
    for key, value in (rollout or {}).items():
        if key == "engine":
            chosen["rollout"] = value
        else:
            plain = as_plain(value) if isinstance(value, Description) else value
            chosen["trainer.group_size" if key == "n" else f"rollout.{key}"] = plain
    chosen |= {f"checkpoint.{key}": value for key, value in (checkpoint or {}).items()}
    return chosen | {OF_TRAINING.get(key, f"trainer.{key}"): value for key, value in (train or {}).items()}


def _compose(
    below: Mapping[str, Any],
    config: str | Path | Mapping[str, Any] | None,
    above: Mapping[str, Any],
    given: Mapping[str, Description],
    overrides: Sequence[str],
) -> ComposedConfig:
    short = read_short_file(config) if isinstance(config, (str, Path)) else dict(config or {})
    replacements = {key: as_plain(item) for key, item in given.items()}
    return compose_over_default("ppo", {**below, **dict(flatten(short)), **above}, overrides, replacements)


def _refuse_unused(run: Any, ref_model: Any, critic_model: Any) -> None:
    faults = []
    if critic_model is not None and not run.algorithm.needs_values:
        faults.append("critic_model is given: the algorithm uses no values. Leave it out, or choose algorithm='ppo'.")
    if ref_model is not None and not run.algorithm.needs_reference:
        faults.append("ref_model is given: algorithm.kl.coef is 0, so nothing is compared with it. Leave it out.")
    if faults:
        raise ConfigError(faults)


def _refuse_objects_elsewhere(run: Any, given: Mapping[str, Description]) -> None:
    models = [item.argument for item in given.values() if isinstance(item, GivenModel)]
    if models and (divided := [sharding for sharding in run.shardings().values() if sharding.needs_processes]):
        kind = type(divided[0]).__name__.lower()
        raise ConfigError(
            f"sharding={kind} trains in processes of its own, and {' and '.join(models)} is an object of this one. "
            "Save it and give a path instead, or leave sharding=none."
        )
    if models and run.trainer.placement is not None:
        raise ConfigError(
            f"trainer.placement puts roles into other processes, and {' and '.join(models)} is an object of this "
            "one. Save it and give a path instead, or leave trainer=local."
        )


def _room(model: Description, rollout: Mapping[str, Any] | None, data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of the data, in which prompts leave room for responses in a short context."""
    options = dict(data or {})
    context = model.max_positions() if isinstance(model, ModelSource) else None
    response = (rollout or {}).get("max_new_tokens")
    if context is None or not isinstance(response, int) or "max_prompt_length" in options or context <= response:
        return options
    usual = PromptOptions().max_prompt_length
    return {**options, "max_prompt_length": min(usual, context - response)}


def _padding(tokenizer: Any) -> Any:
    """The tokenizer, with a pad token: the end of text, where it has none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
