"""PPO from a script or a notebook: one short file, everything in this process, no Ray.

trainer = LocalPPOTrainer(config_path="./config.yaml", train_dataset=dataset)
trainer.fit()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.cluster.placement import DeviceMesh
from verl.component import as_plain
from verl.compose.compose import choices_of
from verl.compose.from_yaml import compose_over_default, read_short_file
from verl.data.rlhf_dataset import RLHFDataset
from verl.trainer.api.from_objects import data_from_object, reward_from_object, run_with_objects
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
    """A `Trainer` of a short YAML file, with every role in this process or in processes that it starts (sharding=ddp).

    Args:
        config_path: merged into the composed default of `verl ppo`: values by their paths, and options of groups by
            name, such as `algorithm: grpo`. None for the default.
        train_dataset: in place of `data.train_files`: an `RLHFDataset`, rows (dicts with a `prompt`), or the path of a
            parquet or JSONL file. `data.eval_files` still names what to evaluate on.
        reward_fn: a function of prompts and responses, in place of the configured reward; see `RewardFunction`.
        overrides: merged into the file, as on the command line.
        device_mesh: devices of each role on this machine, in place of the configured placement.
    Raises:
        ConfigError: every fault in the configuration, before any weight is loaded.
    """
    import rich

    short: dict[str, Any] = {} if config_path is None else read_short_file(config_path)
    objects: dict[str, Any] = (
        {} if reward_fn is None else {"reward": reward_from_object(reward_fn, argument="reward_fn")}
    )
    if device_mesh is not None:
        objects["trainer.placement"] = device_mesh
    options = list(overrides)
    if train_dataset is not None:
        objects["data"], rows = data_from_object(train_dataset), short.get("data", "files")
        if isinstance(rows, Mapping) and "train_files" in rows:
            rich.get_console().print(
                f"data.train_files of {config_path} is ignored: train_dataset is given.", markup=False
            )
        short["data"] = {k: v for k, v in rows.items() if k != "train_files"} if isinstance(rows, Mapping) else rows
        options = ["data=files", *options]  # without the lengths of the built-in example
    composed = compose_over_default(short, options, {key: as_plain(x) for key, x in objects.items()}, PREFERENCES)
    for note in composed.notes:
        rich.get_console().print(note, markup=False, soft_wrap=True)
    return Trainer.of_run(run_with_objects(composed, objects), composed, overrides, choices_of("ppo", composed.options))
