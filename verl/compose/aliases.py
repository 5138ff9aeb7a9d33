"""Aliases: other libraries' spellings of our configuration keys, and keys without an equivalent, each with a message.

This table is the only place with a second spelling of a key. Each use of an alias is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.compose.schema import ROOTS

_OPTIONS = ("none", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp", "cp", "pp", "parallel")  # of the group `sharding`
_SHARDINGS = f"needs a sharding that this version does not have; it has {', '.join(_OPTIONS)}."
_FSDP2 = "is sharding=fsdp here."
_STRATEGY = "is sharding=fsdp sharding.strategy=SHARD_GRAD_OP here, or a sharding that this version does not have."
_OFFLOAD = "is sharding.cpu_offload=true here, with sharding=fsdp, hsdp or tp_fsdp."
_RAY = "is not a key here; with trainer=ray, trainer.placement.address and the keys beside it place the roles."


@dataclass(frozen=True)
class Alias:
    """Translation of a foreign key.

    Attributes:
        path: the key of verl that takes the value unchanged.
        option: `group=option` to add, unless the group was chosen explicitly; `{files}` stands for the data option for
            files of the root.
        nulls: values, besides null, that mean null.
        choices: for keys that select: `group=option` by lower-case value, or "" for a value that changes nothing.
        refusal: message for every value that `choices` does not list.
    """

    path: str | None = None
    option: str | None = None
    nulls: tuple[str, ...] = ()
    choices: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None


_OFF = {"false": "", "null": "", "none": ""}
_NEVER = ("-1", "0", "false")
_BACKENDS = {name: f"sharding={name}" for name in _OPTIONS}
_BACKENDS |= {"local": "sharding=none", "fsdp2": "sharding=fsdp"}
_STRATEGIES = {"no_shard": "none", "none": "none", "full_shard": "fsdp", "hybrid_shard": "hsdp"}
_SINGLE = {"null": "", **{name: f"sharding={option}" for name, option in _STRATEGIES.items()}}

ALIASES: dict[str, Alias] = {
    "actor_rollout.model_name_or_path": Alias(path="actor.model.path", option="actor=pretrained"),
    "actor_rollout_ref.model.path": Alias(path="actor.model.path", option="actor=pretrained"),
    "actor_rollout_ref.actor.optim.lr": Alias(path="actor.optimizer.lr"),
    "actor_rollout_ref.rollout.n": Alias(path="trainer.group_size"),
    "actor_rollout_ref.rollout.temperature": Alias(path="rollout.temperature"),
    "critic.model_name_or_path": Alias(path="critic.model.path", option="critic=own_model"),
    "critic.optim.lr": Alias(path="critic.optimizer.lr"),
    "actor_rollout.use_vllm": Alias(choices={**_OFF, "true": "rollout=vllm"}, refusal="takes true or false."),
    "actor_rollout.fsdp_config.sharding_strategy": Alias(choices=_SINGLE, refusal=_STRATEGY),
    "actor_rollout.fsdp_config.cpu_offload": Alias(choices=_OFF, refusal=_OFFLOAD),
    "trainer.backend": Alias(choices=_BACKENDS, refusal=_SHARDINGS),
    "trainer.save_freq": Alias(path="checkpoint.save_interval", nulls=_NEVER),
    "trainer.default_local_dir": Alias(path="checkpoint.save_dir"),
    "trainer.resume_from_path": Alias(path="resume"),
    "save_freq": Alias(path="checkpoint.save_interval", nulls=_NEVER),
    **{
        f"checkpoint_config.{key}": Alias(path=f"checkpoint.{key}")
        for key in (
            "save_dir",
            "save_interval",
            "keep_last_n",
            "keep_best",
            "save_async",
            "use_safetensors",
            "incremental_save",
            "incremental_base",
            "cold_storage",
        )
    },
    "storage.type": Alias(
        choices={**_OFF, **{name: f"storage={name}" for name in ("local", "s3", "oss", "gcs")}},
        refusal="names a kind of storage that this version does not have; conf/storage/ lists those that it has.",
    ),
    "trainer.test_freq": Alias(path="trainer.eval_interval"),
    "trainer.total_training_steps": Alias(path="trainer.total_steps"),
    "algorithm.adv_estimator": Alias(
        choices={
            "gae": "algorithm=ppo",
            "grpo": "algorithm=grpo",
            "rloo": "algorithm=rloo",
            "remax": "algorithm=remax",
            "opo": "algorithm=opo",
            "reinforce_plus_plus": "algorithm=reinforce_pp",
            "reinforce_plus_plus_baseline": "algorithm=reinforce_pp_baseline",
        },
        refusal="names an estimator that this version does not have; conf/algorithm/ lists those that it has.",
    ),
    "algorithm.gamma": Alias(path="algorithm.advantage.gamma"),
    "algorithm.lam": Alias(path="algorithm.advantage.lam"),
    "data.train_batch_size": Alias(path="trainer.prompts_per_step"),
    "data.max_response_length": Alias(path="rollout.max_new_tokens"),
    "data.train_files": Alias(path="data.train_files", option="data={files}"),
    "data.val_files": Alias(path="data.eval_files", option="data={files}"),
    "teacher": Alias(path="reference.model.path", option="reference=teacher"),
    "teacher.model.path": Alias(path="reference.model.path", option="reference=teacher"),
    "teacher.sharding": Alias(path="reference.sharding", option="reference=teacher"),
    "use_critic": Alias(choices={"true": "", "false": "critic=none"}, refusal="takes true or false."),
    "use_reference_policy": Alias(choices={"true": "", "false": "reference=none"}, refusal="takes true or false."),
    "use_rm": Alias(choices={**_OFF, "true": "reward=model"}, refusal="takes true or false."),
    "reward_model.enable": Alias(choices={**_OFF, "true": "reward=model"}, refusal="takes true or false."),
    "reward_model.model_name_or_path": Alias(path="reward.model.path", option="reward=model"),
    "reward_model.model.path": Alias(path="reward.model.path", option="reward=model"),
    "use_vllm": Alias(choices={**_OFF, "true": "rollout=vllm"}, refusal="takes true or false."),
    "ray.address": Alias(path="trainer.placement.address", option="trainer=ray"),
    "ray.num_cpus": Alias(path="trainer.placement.num_cpus", option="trainer=ray"),
}

SHORT = {
    **{f"tracker={name}": f"[default,{name}]" for name in ("wandb", "trackio", "mlflow")},
    "tracker=[]": "none",
}  # abbreviations of options
OPTIONS = {"sharding=fsdp2": _FSDP2}


@dataclass
class Overrides:
    """Overrides, with aliases translated.

    Attributes:
        options: `group=option` choices, in Hydra's syntax.
        values: by path, in order; texts from a command line are still in Hydra's grammar.
        notes: one line for each alias, with its translation.
        faults: overrides that cannot be composed; they are left out and reported with all other faults.
        is_sweep: whether these are the overrides of a sweep, of all of its jobs.
    """

    options: list[str] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_sweep: bool = False


def translate(root: str, key: str, value: Any, chosen: set[str]) -> Overrides | None:
    """Translate `key=value`; None if the key is not an alias.

    Args:
        root: a name of `ROOTS`.
        key, value: the assignment.
        chosen: groups that were chosen explicitly, which an alias does not choose again.
    """
    assignment, alias = f"{key}={_text(value)}", ALIASES.get(key)
    refusal = OPTIONS.get(assignment) or (_RAY if alias is None and f"{key}.".startswith("ray.") else None)
    if refusal is not None:
        return Overrides(faults=[f"{assignment} {refusal}"])
    if alias is None:
        return None
    if alias.path is not None:
        return _renamed(alias, root, key, value, chosen)
    choice = alias.choices.get(_text(value).lower())
    if choice is None:
        return Overrides(faults=[f"{assignment} {alias.refusal}"])
    became = choice or "nothing: the roles follow from the algorithm"
    return Overrides(options=[choice] if choice else [], notes=[f"{assignment} became {became}"])


def _renamed(alias: Alias, root: str, key: str, value: Any, chosen: set[str]) -> Overrides:
    assert alias.path is not None
    option = alias.option if alias.option and alias.option.split("=")[0] not in chosen else None
    option = option.format(files=ROOTS[root].files) if option else None
    assignment = f"{key}={_text(value)}"
    if _text(value) in alias.nulls:
        value = "null" if isinstance(value, str) else None
    became = " ".join(part for part in (option, f"{alias.path}={_text(value)}") if part)
    notes = [] if became == assignment else [f"{assignment} became {became}"]
    return Overrides([option] if option else [], [(alias.path, value)], notes)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).strip("\"'")
