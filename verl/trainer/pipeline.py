"""DataPipeline and RLTrainer: a run declared by its parts, and one call that carries it out.

result = RLTrainer(DataPipeline(actors=["Qwen/Qwen2-0.5B"], reward_models=[reward], data=rows)).run()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.trainer.forms import summed_rewards
from verl.trainer.library import Trainer
from verl.trainer.loop import Result

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

    def run(self) -> Result:
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
