"""DataPipeline and RLTrainer: a run declared by its components, and trained with one call.

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
RENAMED = {"train_dataset": "data", "eval_dataset": "eval_data", "critic_model": "critics", "ref_model": "references"}


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
        parts = {"actors": actors, "critics": critics, "references": references, "reward_models": reward_models}
        faults = []
        for name, models in parts.items():
            if not isinstance(models, (list, tuple)):
                faults.append(f"{name} is {models!r}: expected a list, such as [{models!r}].")
            elif len(models) > 1 and name in INSTEAD:
                faults.append(f"{name} has {len(models)}. {INSTEAD[name]}.")
        if not faults and not actors:
            faults = ["actors is empty: give the policy to train."]
        if faults:
            raise ConfigError(faults)
        settings = {"algorithm": "ppo" if critics else "grpo", **(train_config or {})}
        self.arguments = {
            "model": actors[0], "reward_model": summed_rewards(reward_models),
            "critic_model": critics[0] if critics else None, "ref_model": references[0] if references else None,
            "algorithm": settings.pop("algorithm"), "train_config": settings, "tokenizer": tokenizer,
            "train_dataset": data, "eval_dataset": eval_data, "rollout_config": rollout_config,
            "checkpoint_config": checkpoint_config, "data_config": data_config, "overrides": overrides,
        }  # fmt: skip


class RLTrainer:
    """Runs a pipeline, with the same roles and the same loop as `verl ppo`.

    Models are switched between training, scoring and generation automatically; do not call `.train()`, `.eval()` or
    `no_grad()`.

    Args:
        pipeline: what to run.
        data, eval_data: prompts to train and to evaluate on, if the pipeline has none.
    Raises:
        ConfigError: the pipeline has prompts too.
    """

    def __init__(self, pipeline: DataPipeline, data: Any = None, eval_data: Any = None):
        if not isinstance(pipeline, DataPipeline):
            raise ConfigError(f"pipeline is a {type(pipeline).__name__}: expected a DataPipeline.")
        self.pipeline, self._arguments = pipeline, dict(pipeline.arguments)
        for argument, rows in (("train_dataset", data), ("eval_dataset", eval_data)):
            if rows is not None and self._arguments[argument] is not None:
                raise ConfigError(f"{RENAMED[argument]} is given, and the pipeline has its own: leave one of them out.")
            self._arguments[argument] = self._arguments[argument] if rows is None else rows

    def run(self) -> TrainResult:
        """Train to the end and close the trainer. Each call is a separate run.

        Raises:
            ConfigError: a fault in the parts, by their names, before any weight is loaded.
        """
        try:
            trainer = Trainer(**self._arguments)
        except ConfigError as error:
            faults = [re.sub(r"^model\b", "actors", fault) for fault in error.faults]
            names = re.compile(rf"\b({'|'.join(RENAMED)})\b")
            raise ConfigError([names.sub(lambda name: RENAMED[name[0]], fault) for fault in faults]) from error
        with trainer:
            return trainer.fit()
