"""PPO from a script or a notebook: one short file, everything in this process, no Ray.

trainer = LocalPPOTrainer(config_path="./config.yaml", train_dataset=dataset)
trainer.fit()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.cluster.placement import ROLES, SAMPLER, DeviceMesh
from verl.component import Description, as_plain
from verl.compose.compose import choices_of
from verl.compose.from_yaml import ComposedConfig, compose_over_default, read_short_file
from verl.compose.overrides import flatten, parse_overrides
from verl.data.base import PromptOptions
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError
from verl.trainer.api.from_objects import PromptsObject, data_from_object, reward_from_object, run_with_objects
from verl.trainer.api.trainer import Trainer
from verl.utils.signals import component_exits

PREFERENCES = {"tracker.console.stage_lines": True}  # progress of a script, for its author


@component_exits()
def LocalPPOTrainer(
    config_path: str | Path | None = "./config.yaml",
    train_dataset: RLHFDataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
    reward_fn: Callable | None = None,
    overrides: Sequence[str] = (),
    device_mesh: DeviceMesh | None = None,
) -> Trainer:
    """A `Trainer` with every role in this process, or in processes that it starts itself (sharding=ddp).

    Works from a script without a `__main__` guard and from a notebook. Where several devices are asked for
    (`trainer.n_gpus_per_node`, or a mesh) and no backend is named, they are used by `sharding=ddp`; on a machine
    without GPUs the run takes one process, and says so.

    Args:
        config_path: a short YAML file, laid over the composed default of `verl ppo`: values by their paths, and
            options of groups by name, such as `algorithm: grpo`. None for the default.
        train_dataset: prompts to train on, in place of the configured data: an `RLHFDataset`, a list of rows (dicts
            with a `prompt`), or the path of a parquet or JSONL file. `data.eval_files` still names what to evaluate on.
        reward_fn: a function of prompts and responses, in place of the configured reward; see `RewardFunction`.
        overrides: laid over the file, as on the command line.
        device_mesh: which roles live on which devices of this machine, in place of the configured placement.
    Raises:
        ConfigError: every fault in the configuration, before any weight is loaded.
    """
    import rich

    short = read_short_file(config_path) if config_path is not None else {}
    objects: dict[str, Description] = {}
    if train_dataset is not None:
        objects["data"] = data_from_object(train_dataset)
    if reward_fn is not None:
        objects["reward"] = reward_from_object(reward_fn, argument="reward_fn")
    if device_mesh is not None:
        objects["trainer.placement"] = device_mesh
    chosen, notes = sharding_for_devices(short, overrides, device_mesh)
    composed = compose_short_file(short, objects, [*overrides, *chosen])
    for note in [*notes, *composed.notes]:
        rich.get_console().print(note, markup=False, soft_wrap=True)
    run = run_with_objects(composed, objects)
    _refuse_other_options(run.data, train_dataset)
    return Trainer.of_run(run, composed, overrides, choices_of("ppo", composed.options))


SHARDINGS = ("sharding", "trainer.backend", "actor_rollout.fsdp_config.sharding_strategy")  # keys that name one


def sharding_for_devices(
    short: Mapping[str, Any], overrides: Sequence[str], device_mesh: DeviceMesh | None
) -> tuple[list[str], list[str]]:
    """Sharding for several devices where no backend is named: data parallelism, or one process where there are none.

    Returns:
        Overrides, and a sentence for each.
    """
    import torch

    named = {**dict(flatten(short)), **dict(parse_overrides(overrides)[0])}
    if any(key in SHARDINGS or key.startswith("sharding.") for key in named):
        return [], []
    if device_mesh is not None:
        sizes = device_mesh.sizes(ROLES, 1)
        if all(size == 1 for role, size in sizes.items() if role != SAMPLER):
            return [], []
        return ["sharding=ddp"], ["device_mesh has roles on several devices, and no backend is named: sharding=ddp."]
    count, there = named.get("trainer.n_gpus_per_node", 1), torch.cuda.device_count()
    if not isinstance(count, int) or count < 2:
        return [], []
    if there:
        return ["sharding=ddp"], [f"trainer.n_gpus_per_node is {count}, and no backend is named: sharding=ddp."]
    return ["trainer.n_gpus_per_node=1"], [
        f"trainer.n_gpus_per_node is {count}, and this machine has no GPU: the run takes one process. For several on "
        "its cores set trainer.backend=ddp."
    ]


def compose_short_file(
    short: Mapping[str, Any],
    objects: Mapping[str, Description],
    overrides: Sequence[str],
) -> ComposedConfig:
    """The default run with the short file, the user's objects, and the overrides laid over it in turn."""
    notes: list[str] = []
    if "data" in objects:
        data = short.get("data")
        if isinstance(data, Mapping) and "train_files" in data:
            short = {**short, "data": {key: value for key, value in data.items() if key != "train_files"}}
            notes = ["data.train_files is ignored: train_dataset is given."]
        if not any(option.startswith("data=") for option in overrides):
            overrides = ["data=files", *overrides]  # not the lengths that suit the built-in example
    replacements = {key: as_plain(item) for key, item in objects.items()}
    composed = compose_over_default(short, overrides, replacements, PREFERENCES)
    composed.notes = [*notes, *composed.notes]
    return composed


def _refuse_other_options(described: Any, dataset: Any) -> None:
    if not isinstance(described, PromptsObject) or not isinstance(dataset, RLHFDataset):
        return
    faults = []
    for f in dataclasses.fields(PromptOptions):
        configured, made_with = getattr(described, f.name), getattr(dataset.options, f.name)
        if configured != made_with:
            faults.append(f"data.{f.name} is {configured!r}: train_dataset was made with {made_with!r}. Leave one out.")
    if faults:
        raise ConfigError(faults)
