"""PPO from a script or a notebook: one short file, everything in this process, no Ray.

trainer = LocalPPOTrainer(config_path="./config.yaml", train_dataset=dataset)
trainer.fit()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.cluster.placement import ROLES, ROLLOUT, DeviceMesh
from verl.component import Description, as_plain
from verl.compose.compose import choices_of
from verl.compose.from_yaml import ComposedConfig, compose_over_default, read_short_file
from verl.compose.overrides import flatten, parse_overrides
from verl.data.base import PromptOptions
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError
from verl.trainer.api.from_objects import data_from_object, reward_from_object, run_with_objects
from verl.trainer.api.trainer import Trainer
from verl.utils.signals import component_exits

PREFERENCES = {"tracker.console.stage_lines": True}  # progress of a script, for its author
SHARDINGS = ("sharding", "trainer.backend", "actor_rollout.fsdp_config.sharding_strategy")  # keys that name one


@component_exits()
def LocalPPOTrainer(
    config_path: str | Path | None = "./config.yaml",
    train_dataset: RLHFDataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
    reward_fn: Callable | None = None,
    overrides: Sequence[str] = (),
    device_mesh: DeviceMesh | None = None,
) -> Trainer:
    """A `Trainer` of a short YAML file, with every role in this process or in processes that it starts (sharding=ddp).

    Args:
        config_path: merged into the composed default of `verl ppo`: values by their paths, and options of groups by
            name, such as `algorithm: grpo`. None for the default.
        train_dataset: in place of the configured data: an `RLHFDataset`, rows (dicts with a `prompt`), or the path of a
            parquet or JSONL file. `data.eval_files` still names what to evaluate on.
        reward_fn: a function of prompts and responses, in place of the configured reward; see `RewardFunction`.
        overrides: merged into the file, as on the command line.
        device_mesh: devices of each role on this machine, in place of the configured placement.
    Raises:
        ConfigError: every fault in the configuration, before any weight is loaded.
    """
    import rich

    short, objects = {} if config_path is None else read_short_file(config_path), dict[str, Description]()
    objects |= {} if train_dataset is None else {"data": data_from_object(train_dataset)}
    objects |= {} if reward_fn is None else {"reward": reward_from_object(reward_fn, argument="reward_fn")}
    objects |= {} if device_mesh is None else {"trainer.placement": device_mesh}
    chosen, notes = sharding_for_devices(short, overrides, device_mesh)
    composed = compose_short_file(short, objects, [*overrides, *chosen])
    for note in [*notes, *composed.notes]:
        rich.get_console().print(note, markup=False, soft_wrap=True)
    run = run_with_objects(composed, objects)
    if isinstance(train_dataset, RLHFDataset):
        pairs = ((f.name, getattr(run.data, f.name), getattr(train_dataset.options, f.name)) for f in OPTIONS)
        other = [f"data.{name} is {x!r}: train_dataset was made with {y!r}." for name, x, y in pairs if x != y]
        if other:
            raise ConfigError([f"{fault} Leave one out." for fault in other])
    return Trainer.of_run(run, composed, overrides, choices_of("ppo", composed.options))


OPTIONS = dataclasses.fields(PromptOptions)


def sharding_for_devices(
    short: Mapping[str, Any], overrides: Sequence[str], device_mesh: DeviceMesh | None
) -> tuple[list[str], list[str]]:
    """Overrides, each with a message, if several devices and no backend are configured: data parallelism, or one
    process on a machine without GPUs."""
    import torch

    named = {**dict(flatten(short)), **dict(parse_overrides(overrides)[0])}
    if any(key in SHARDINGS or key.startswith("sharding.") for key in named):
        return [], []
    what, count = "", named.get("trainer.n_gpus_per_node", 1)
    if device_mesh is not None:
        sizes = (size for role, size in device_mesh.sizes(ROLES, 1).items() if role != ROLLOUT)
        what = "device_mesh has roles on several devices" if max(sizes) > 1 else ""
    elif isinstance(count, int) and count > 1:
        what = f"trainer.n_gpus_per_node is {count}"
        if not torch.cuda.device_count():
            note = f"{what}, and this machine has no GPU: the run takes one process. For several on its cores set "
            return ["trainer.n_gpus_per_node=1"], [f"{note}trainer.backend=ddp."]
    return (["sharding=ddp"], [f"{what}, and no backend is named: sharding=ddp."]) if what else ([], [])


def compose_short_file(
    short: Mapping[str, Any], objects: Mapping[str, Description], overrides: Sequence[str]
) -> ComposedConfig:
    """The default run, merged with the short file, the user's objects and the overrides, in this order."""
    notes, data = [], short.get("data")
    if "data" in objects:
        if isinstance(data, Mapping) and "train_files" in data:
            short = {**short, "data": {key: value for key, value in data.items() if key != "train_files"}}
            notes = ["data.train_files is ignored: train_dataset is given."]
        if not any(option.startswith("data=") for option in overrides):
            overrides = ["data=files", *overrides]  # without the lengths of the built-in example
    replacements = {key: as_plain(item) for key, item in objects.items()}
    composed = compose_over_default(short, overrides, replacements, PREFERENCES)
    composed.notes = [*notes, *composed.notes]
    return composed
