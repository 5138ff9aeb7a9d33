"""Trainer: policy optimisation from a script or a notebook, with models, data and rewards passed as objects.

trainer = Trainer(model="Qwen/Qwen2-0.5B", reward_model=reward, train_dataset=rows, algorithm="grpo")
loss = trainer.step()

`DataPipeline` and `RLTrainer` declare a run by its parts and run it with one call:

result = RLTrainer(DataPipeline(actors=["Qwen/Qwen2-0.5B"], reward_models=[reward], data=rows)).run()
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.checkpoint.config import Checkpointing
from verl.component import Description, as_plain, field_types
from verl.compose.from_yaml import (
    ComposedConfig,
    compose_over_default,
    load_option,
    read_short_file,
    rollout_kind,
)
from verl.compose.overrides import flatten
from verl.compose.suggestions import described, key_faults
from verl.data.arithmetic import ArithmeticPrompts
from verl.data.base import PromptOptions
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import ModelSource
from verl.trainer.api.base import BaseTrainer
from verl.trainer.api.from_objects import (
    ModelObject,
    PromptsObject,
    data_from_object,
    model_from_object,
    reward_from_object,
    run_with_objects,
    summed_rewards,
)
from verl.trainer.config import PPOSettings
from verl.trainer.train_loop import TrainResult
from verl.utils.component_exits import component_exits

_log = logging.getLogger(__name__)

PROMPTS_PER_STEP = 64  # at most, where nothing says how many
# Keys of rollout_config beside those of the engine: which one, responses per prompt, a limit of both texts together.
OF_ROLLOUT = ("engine", "n", "max_length")
OF_TRAINING = {  # keys of train_config with another configuration path
    "lr": "actor.optimizer.lr",
    "critic_lr": "critic.optimizer.lr",
    "num_epochs": "trainer.total_epochs",
}


class Trainer(BaseTrainer):
    """Policy optimisation over the composed default of `verl ppo`, by the same roles and the same loop.

    A model may be a path, a hub name, a description such as `TinyModel()`, or a loaded Hugging Face model, which is
    trained in place. Only warnings are shown on the console.

    Args:
        model: the policy.
        reward_model: a function of prompts and responses, `file.py:function`, a reward model (a module that returns
            `scores`, a Hugging Face sequence-classification model, or the path of one), or a description.
        train_dataset: prompts: rows (dicts with a `prompt`), an `RLHFDataset`, a parquet or JSONL file, or several.
            None: the data of the configuration, which are the built-in sums where it names none, with a warning.
        ref_model: reference model for KL, for algorithms that use one; None: the initial policy.
        critic_model: initial model of the critic, for algorithms that need one; None: the initial policy.
        tokenizer: required for a loaded model; default: the tokenizer in the model's directory.
        reward_tokenizer: of a reward model that is passed as a module and has another tokenizer than the policy.
        eval_dataset: like `train_dataset`; None: no evaluation.
        algorithm: an option of the group `algorithm`, or an `Algorithm`.
        rollout_config: keys of the rollout engine (`temperature`, `max_new_tokens`, ...), `n` responses per prompt,
            `engine`, an option of the group `rollout`, and instead of `max_new_tokens` a `max_length` of prompt and
            response together, at most the model's context: half of it is for the response, or what
            `data_config["max_prompt_length"]` leaves.
        checkpoint_config: keys of `Checkpointing` (`save_dir`, `save_interval`, `keep_last_n`, ...); None: save only
            when `save_checkpoint` is called.
        train_config: keys of `PPOSettings` (`total_steps`, `prompts_per_step`, `seed`, ...), `lr`, `critic_lr`, and
            `num_epochs` for `total_epochs`.
        data_config: keys of `PromptOptions`.
        lora: train a low-rank adapter: a `LoRA`, or a mapping of its keys.
        config: a short YAML file or a mapping that is merged into the default; arguments have precedence over it.
        overrides: as on the command line; they have the highest precedence.

    Attributes:
        config: the composed configuration.

    Raises:
        ConfigError: with all faults that can be found before weights are loaded.
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
        _refuse_missing(model=model, reward_model=reward_model)
        if train_dataset is None and eval_dataset is not None:
            raise ConfigError("eval_dataset is given without train_dataset. Give both, or neither.")
        _refuse_unknown_keys(rollout_config, checkpoint_config, train_config, data_config)
        self._reward_tokenizer = reward_tokenizer
        tokenizer = None if tokenizer is None else _padding(tokenizer)
        given: dict[str, Description] = {
            "actor.model": model_from_object("model", model, tokenizer),
            "reward": reward_from_object(reward_model, reward_tokenizer),
        }
        if ref_model is not None:
            given["reference.model"] = model_from_object("ref_model", ref_model, tokenizer)
        if critic_model is not None:
            given["critic.model"] = model_from_object("critic_model", critic_model, tokenizer)
        if lora is not None:
            given["actor.lora"] = described(LoRA, "lora", lora)
        rollout_config, data_config = _with_lengths(given["actor.model"], rollout_config or {}, data_config or {})
        if train_dataset is not None:
            room = _room(given["actor.model"], rollout_config, data_config)
            given["data"] = data_from_object(train_dataset, eval_dataset, described(PromptOptions, "data_config", room))
        if isinstance(algorithm, Algorithm):
            given["algorithm"] = algorithm
        below = _defaults(given, checkpoint_config is not None, algorithm)
        above = _arguments(algorithm, rollout_config, checkpoint_config, train_config)
        if train_dataset is None:
            above |= {f"data.{key}": value for key, value in data_config.items()}
        composed = _compose(below, config, above, given, overrides)
        run = run_with_objects(composed, given)
        _refuse_unused(run, ref_model, critic_model)
        _refuse_objects_elsewhere(run, given)
        self._build(run, composed, overrides, tokenizer)
        if train_dataset is None and isinstance(run.data, ArithmeticPrompts):
            _log.warning("No prompts are given: the run trains on the built-in sums, such as 37+58=.")

    def _described_reward(self, reward: Any) -> Any:
        return reward_from_object(reward, self._reward_tokenizer)


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


def _defaults(given: Mapping[str, Description], saves: bool, algorithm: str | Algorithm) -> dict[str, Any]:
    """Defaults for library use: options of groups, and values by path."""
    options = {
        "actor": "pretrained",
        "critic": "own_model" if "critic.model" in given else "same_as_actor",
        "checkpoint": "async" if saves else "off",
        "tracker.console": None,
    }
    if (data := given.get("data")) is None:
        return options
    prompts = min(PROMPTS_PER_STEP, data.num_rows if isinstance(data, PromptsObject) else PROMPTS_PER_STEP)
    if prompts % 2:  # of few rows; what a step has must divide into its mini-batches
        chosen = algorithm if isinstance(algorithm, Algorithm) else load_option("ppo", "algorithm", algorithm)
        prompts = max(prompts - prompts % chosen.mini_batches, 1)
    return {
        **options,
        "data": "files",  # not the lengths that suit the built-in example
        "trainer.prompts_per_step": prompts,
    }


def _arguments(
    algorithm: str | Algorithm,
    rollout: Mapping[str, Any] | None,
    checkpoint: Mapping[str, Any] | None,
    train: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments as configuration values."""
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
    models = [item.argument for item in given.values() if isinstance(item, ModelObject)]
    if models and (parallel_info := [sharding for sharding in run.shardings().values() if sharding.needs_processes]):
        kind = type(parallel_info[0]).__name__.lower()
        raise ConfigError(
            f"sharding={kind} trains in processes of its own, and {' and '.join(models)} is an object of this one. "
            "Save it and give a path instead, or leave sharding=none."
        )
    if models and run.trainer.placement is not None:
        raise ConfigError(
            f"trainer.placement puts roles into other processes, and {' and '.join(models)} is an object of this "
            "one. Save it and give a path instead, or leave trainer=local."
        )


def _with_lengths(
    model: Description, rollout: Mapping[str, Any], data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both configurations with `max_length` replaced by separate limits for prompts and responses."""
    rollout, data = dict(rollout), dict(data)
    total = rollout.pop("max_length", None)
    if total is None:
        return rollout, data
    if not isinstance(total, int) or isinstance(total, bool) or total < 2:
        raise ConfigError(f"rollout_config.max_length is {total!r}: expected a whole number of at least 2.")
    context = model.max_positions() if isinstance(model, ModelSource) else None
    total = total if context is None else min(total, context)
    prompt, response = data.get("max_prompt_length"), rollout.get("max_new_tokens")
    if prompt is not None and response is not None:
        raise ConfigError(
            f"rollout_config.max_length is {total}: data_config.max_prompt_length {prompt} and rollout_config."
            f"max_new_tokens {response} say the same. Leave one of them out."
        )
    if response is None:
        response = total // 2 if prompt is None else total - prompt
    prompt = total - response if prompt is None else prompt
    if prompt < 1 or response < 1:
        known = "data_config.max_prompt_length" if "max_prompt_length" in data else "rollout_config.max_new_tokens"
        raise ConfigError(f"rollout_config.max_length is {total}: {known} leaves nothing of it. Set that lower.")
    return {**rollout, "max_new_tokens": response}, {**data, "max_prompt_length": prompt}


def _room(model: Description, rollout: Mapping[str, Any] | None, data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The data options, with a limit on prompts that leaves room for responses in a short context."""
    options = dict(data or {})
    context = model.max_positions() if isinstance(model, ModelSource) else None
    response = (rollout or {}).get("max_new_tokens")
    if context is None or not isinstance(response, int) or "max_prompt_length" in options or context <= response:
        return options
    usual = PromptOptions().max_prompt_length
    return {**options, "max_prompt_length": min(usual, context - response)}


def _padding(tokenizer: Any) -> Any:
    """The tokenizer; if it has no pad token, the end-of-text token is used."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


INSTEAD = {
    "actors": "One policy is trained per run. To compare several, make a pipeline for each",
    "critics": "A run has one value function, of one policy. Leave the others out",
    "references": "KL is measured against one policy. Leave the others out",
}


class DataPipeline:
    """The parts of a run. Each part accepts the same forms as the arguments of `Trainer`.

    Args:
        actors: the policy, alone.
        reward_models: rewards; several are a weighted sum, each logged by its name. One of them may be
            `{"reward": ..., "weight": 0.5, "name": "style"}`.
        critics: initial model of the critic, or none. With one the default algorithm is `ppo`, otherwise `grpo`;
            `train_config` can name another.
        references: reference model for KL, or none.
        data: prompts to train on; may be given to `RLTrainer` instead. None: as `train_dataset` of `Trainer`.
        eval_data: prompts to evaluate on, or None.
        tokenizer: of the policy; needed where it is a loaded model.
        rollout_config, checkpoint_config, data_config: as of `Trainer`.
        train_config: as of `Trainer`, and `algorithm`.
        overrides: as on the command line.

    Raises:
        ConfigError: a part is missing, or there are more of one kind than a run supports.
    """

    def __init__(
        self,
        actors: Sequence[Any] = (),
        reward_models: Sequence[Any] = (),
        critics: Sequence[Any] = (),
        rollout_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
        *,
        data: Any = None,
        references: Sequence[Any] = (),
        eval_data: Any = None,
        tokenizer: Any = None,
        checkpoint_config: Mapping[str, Any] | None = None,
        data_config: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
    ):
        settings = dict(train_config or {})
        roles = {"actors": actors, "critics": critics, "references": references}
        faults = [fault for name, given in roles.items() for fault in _count_faults(name, given)]
        if not _is_list(reward_models):
            faults.append(f"reward_models is {reward_models!r}: expected a list of rewards.")
        if faults:
            raise ConfigError(faults)
        self.arguments = {
            "model": actors[0],
            "reward_model": summed_rewards(reward_models),
            "critic_model": critics[0] if critics else None,
            "ref_model": references[0] if references else None,
            "algorithm": settings.pop("algorithm", "ppo" if critics else "grpo"),
            "tokenizer": tokenizer,
            "train_dataset": data,
            "eval_dataset": eval_data,
            "rollout_config": rollout_config,
            "checkpoint_config": checkpoint_config,
            "train_config": settings,
            "data_config": data_config,
            "overrides": overrides,
        }


class RLTrainer:
    """Runs a pipeline, with the same roles and the same loop as `verl ppo`.

    Models are switched between training, scoring and generation automatically; do not call `.train()`, `.eval()` or
    `no_grad()`.

    Args:
        pipeline: what to run.
        data, eval_data: prompts to train and to evaluate on, where the pipeline has none.
    Raises:
        ConfigError: the pipeline has prompts too.
    """

    def __init__(self, pipeline: DataPipeline, data: Any = None, eval_data: Any = None):
        if not isinstance(pipeline, DataPipeline):
            raise ConfigError(f"pipeline is a {type(pipeline).__name__}: expected a DataPipeline.")
        self.pipeline, self._arguments = pipeline, dict(pipeline.arguments)
        for name, argument, rows in (("data", "train_dataset", data), ("eval_data", "eval_dataset", eval_data)):
            if rows is not None and self._arguments[argument] is not None:
                raise ConfigError(f"{name} is given, but the pipeline has its own {name}: leave one of them out.")
            if rows is not None:
                self._arguments[argument] = rows

    def run(self) -> TrainResult:
        """Train to the end and close the trainer. Each call is a separate run.

        Raises:
            ConfigError: a fault in the parts, before any weight is loaded.
        """
        try:
            trainer = Trainer(**self._arguments)
        except ConfigError as error:
            raise ConfigError([_with_names_of_parts(fault) for fault in error.faults]) from error
        with trainer:
            return trainer.fit()


def _with_names_of_parts(fault: str) -> str:
    """A message about arguments of `Trainer`, with the names that a `DataPipeline` has for them."""
    parts = {"train_dataset": "data", "eval_dataset": "eval_data", "critic_model": "critics", "ref_model": "references"}
    fault = re.sub(r"^model\b", "actors", fault)
    return re.sub(rf"\b({'|'.join(parts)})\b", lambda name: parts[name[0]], fault)


def _count_faults(name: str, given: Any) -> list[str]:
    if not _is_list(given):
        return [f"{name} is {given!r}: expected a list, such as [{given!r}]."]
    if name == "actors" and not given:
        return ["actors is empty: give the policy to train."]
    return [f"{name} has {len(given)}. {INSTEAD[name]}."] if len(given) > 1 else []


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
