"""Trainer: policy optimisation from a script or a notebook, with models, data and rewards passed as objects.

trainer = Trainer(model="Qwen/Qwen2-0.5B", reward_model=reward, train_dataset=rows, algorithm="grpo")
loss = trainer.step()

DataPipeline and RLTrainer declare a run by its parts, and carry it out by one call:

result = RLTrainer(DataPipeline(actors=["Qwen/Qwen2-0.5B"], reward_models=[reward], data=rows)).run()
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
from verl.trainer.api.base import BaseTrainer
from verl.trainer.api.from_objects import (
    ModelObject,
    PromptsObject,
    carried_in,
    data_from_object,
    hand_over,
    model_from_object,
    reward_from_object,
    summed_rewards,
)
from verl.trainer.config import PPOSettings
from verl.trainer.train_loop import TrainResult
from verl.utils.component_exits import component_exits

PROMPTS_PER_STEP = 64  # at most, where nothing says how many
OF_ROLLOUT = ("engine", "n")  # keys of rollout_config beside those of the engine: which one, and responses per prompt
OF_TRAINING = {
    "lr": "actor.optimizer.lr",
    "critic_lr": "critic.optimizer.lr",
}  # keys of train_config that lie elsewhere


class Trainer(BaseTrainer):
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
            "actor.model": model_from_object("model", model, tokenizer),
            "reward": reward_from_object(reward_model, reward_tokenizer),
        }
        if ref_model is not None:
            given["reference.model"] = model_from_object("ref_model", ref_model, tokenizer)
        if critic_model is not None:
            given["critic.model"] = model_from_object("critic_model", critic_model, tokenizer)
        if lora is not None:
            given["actor.lora"] = described(LoRA, "lora", lora)
        room = _room(given["actor.model"], rollout_config, data_config)
        given["data"] = data_from_object(train_dataset, eval_dataset, described(PromptOptions, "data_config", room))
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


def _defaults(given: Mapping[str, Description], saves: bool) -> dict[str, Any]:
    """What a library wants where nobody says otherwise: options of groups, and values by path."""
    data = given["data"]
    rows = data.num_rows if isinstance(data, PromptsObject) else PROMPTS_PER_STEP
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
    models = [item.argument for item in given.values() if isinstance(item, ModelObject)]
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


INSTEAD = {
    "actors": "One policy is trained per run. To compare several, make a pipeline for each",
    "critics": "A run has one value function, of one policy. Leave the others out",
    "references": "KL is measured against one policy. Leave the others out",
}


class DataPipeline:
    """The parts of a run. Each part has the forms that the arguments of `Trainer` have.

    Args:
        actors: the policy, alone.
        reward_models: rewards; several are a weighted sum, each logged by its name. One of them may be
            `{"reward": ..., "weight": 0.5, "name": "style"}`.
        critics: what the critic starts from, or none. With one the algorithm is `ppo`, unless `train_config` names
            another; without, `grpo`.
        references: what KL is measured against, or none.
        data: prompts to train on.
        eval_data: prompts to evaluate on, or None.
        tokenizer: of the policy; needed where it is a loaded model.
        rollout_config, checkpoint_config, data_config: as of `Trainer`.
        train_config: as of `Trainer`, and `algorithm`.
        overrides: as on the command line.

    Raises:
        ConfigError: a part is missing, or there are more of it than a run has.
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
        if data is None:
            faults.append("data is missing: give rows with a `prompt`, an RLHFDataset, or a file.")
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
    """Carries a pipeline out, by the same roles and the same loop as `main_ppo.py`.

    Models are switched between training, rating and sampling where it is needed; nobody calls `.train()`, `.eval()` or
    `no_grad()`.

    Args:
        pipeline: what to run.
    """

    def __init__(self, pipeline: DataPipeline):
        if not isinstance(pipeline, DataPipeline):
            raise ConfigError(f"pipeline is a {type(pipeline).__name__}: expected a DataPipeline.")
        self.pipeline = pipeline

    def run(self) -> TrainResult:
        """Train to the end, and let go of everything. May be called again, for a run of its own.

        Raises:
            ConfigError: a fault in the parts, before any weight is loaded.
        """
        with Trainer(**self.pipeline.arguments) as trainer:
            return trainer.fit()


def _count_faults(name: str, given: Any) -> list[str]:
    if not _is_list(given):
        return [f"{name} is {given!r}: expected a list, such as [{given!r}]."]
    if name == "actors" and not given:
        return ["actors is empty: give the policy to train."]
    return [f"{name} has {len(given)}. {INSTEAD[name]}."] if len(given) > 1 else []


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
