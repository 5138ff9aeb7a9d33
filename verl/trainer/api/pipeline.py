"""DataPipeline and RLTrainer: a run declared by its parts, and trained to its end with one call.

result = RLTrainer(DataPipeline(actors=["Qwen/Qwen2-0.5B"], reward_models=[reward], data=rows)).run()
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.trainer.api.from_objects import summed_rewards
from verl.trainer.api.trainer import Trainer
from verl.trainer.train_loop import TrainResult

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
        faults = [fault for name, models in roles.items() for fault in _count_faults(name, models)]
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


def _count_faults(name: str, models: Any) -> list[str]:
    if not _is_list(models):
        return [f"{name} is {models!r}: expected a list, such as [{models!r}]."]
    if name == "actors" and not models:
        return ["actors is empty: give the policy to train."]
    return [f"{name} has {len(models)}. {INSTEAD[name]}."] if len(models) > 1 else []


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
