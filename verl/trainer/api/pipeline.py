"""DataPipeline and RLTrainer: a run declared by its components, and trained with one call.

result = RLTrainer(DataPipeline(actors=["Qwen/Qwen2-0.5B"], reward_models=[reward], data=rows)).run()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.trainer.api.from_objects import summed_rewards
from verl.trainer.api.trainer import Trainer
from verl.trainer.train_loop import TrainResult


class DataPipeline:
    """The components of a run, each in any form that `Trainer` accepts, and all other arguments of `Trainer`.

    Args:
        actors: the policy; one.
        reward_models: rewards; several are a weighted sum, each logged by its name. One of them may be
            `{"reward": ..., "weight": 0.5, "name": "style"}`.
        critics, references: initial model of the critic, and reference model for KL, one or none of each. With a critic
            the default algorithm is `ppo`, otherwise `grpo`.
        train_config: as of `Trainer`, and `algorithm`.
        data, eval_data: prompts to train and to evaluate on; may be given to `RLTrainer` instead.
    Raises:
        ConfigError: there is no policy, or more models of one kind than a run has.
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
        models = {"model": actors, "critic_model": critics, "ref_model": references}
        for name, given in zip(("actors", "critics", "references"), models.values(), strict=True):
            if not isinstance(given, (list, tuple)) or len(given) > 1 or (name == "actors" and not given):
                raise ConfigError(f"{name} is {given!r}: expected a list of one model. A run trains one policy.")
        settings = {"algorithm": "ppo" if critics else "grpo", **(train_config or {})}
        self.arguments: dict[str, Any] = {name: given[0] if given else None for name, given in models.items()} | {
            "reward_model": summed_rewards(reward_models), "tokenizer": tokenizer,
            "algorithm": settings.pop("algorithm"), "train_config": settings, "rollout_config": rollout_config,
            "checkpoint_config": checkpoint_config, "data_config": data_config, "overrides": overrides,
            "train_dataset": data, "eval_dataset": eval_data,
        }  # fmt: skip


class RLTrainer:
    """Runs a pipeline, with the same roles and the same loop as `verl ppo`.

    Models are switched between training, scoring and generation automatically; do not call `.train()`, `.eval()` or
    `no_grad()`.

    Args:
        pipeline: what to run.
        data, eval_data: prompts to train and to evaluate on, in place of those of the pipeline.
    """

    def __init__(self, pipeline: DataPipeline, data: Any = None, eval_data: Any = None):
        given = {"train_dataset": data, "eval_dataset": eval_data}
        self.pipeline = pipeline
        self._arguments = pipeline.arguments | {name: rows for name, rows in given.items() if rows is not None}

    def run(self) -> TrainResult:
        """Train to the end and close the trainer. Each call is a separate run.

        Raises:
            ConfigError: a fault in the parts, by the names of `Trainer`'s arguments, before any weight is loaded.
        """
        with Trainer(**self._arguments) as trainer:
            return trainer.fit()
