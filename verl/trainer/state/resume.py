"""Resuming: may this configuration continue a checkpoint, and in what do the two differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from verl.checkpoint.resume_point import ResumePoint
from verl.errors import ConfigError
from verl.ops.cpu_matmul import active_library
from verl.trainer.state.lineage import ParentCheckpoint
from verl.trainer.state.training_identity import DIGEST, differences, sources_of


def refuse_other_identity(point: ResumePoint, identity: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: model, tokenizer, data or algorithm are not those of the checkpoint; names every key.
    """
    changes = differences(point.state.get("identity", {}), identity)
    if changes:
        raise ConfigError(
            [
                f"{path} is {_shown(now)}: the checkpoint {point.checkpoint.name} was trained with {_shown(before)}, "
                "so this would be another training. Set it back, or start without resume."
                for path, (before, now) in changes.items()
            ]
        )


def difference_messages(point: ResumePoint, config: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs from the checkpoint's and may."""
    changes = _training_differences(point.state.get("config", {}), config)
    messages = [f"{path}: {_shown(before)} before, {_shown(now)} now" for path, (before, now) in changes.items()]
    before, now = point.state.get("sources"), sources_of(config)
    if isinstance(before, Mapping):
        edited = [path for path in now if path in before and before[path] != now[path] and path not in changes]
        named = {path: _at(config, path) for path in edited}
        messages += [f"{path}: the source of {name} was edited since the save" for path, name in named.items()]
    threads, here = point.state.get("num_threads"), torch.get_num_threads()
    if isinstance(threads, int) and threads != here and "trainer.num_threads" not in changes:
        messages.append(
            f"threads of torch: {threads} before, {here} now. Sums may be rounded otherwise; set "
            f"trainer.num_threads={threads} for the same numbers"
        )
    library = point.state.get("cpu_matmul", "mkl")
    if library in ("mkl", "onednn") and library != active_library() and "trainer.cpu_matmul" not in changes:
        messages.append(
            f"float32 products on the CPU: by {library} before, by {active_library()} now. Last bits differ; set "
            f"trainer.cpu_matmul={library} for the same numbers"
        )
    return messages


def _at(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        node = node[int(key)] if isinstance(node, (list, tuple)) else node[key]
    return node


# Settings of the end of a run and of the checkpoint location, which do not affect training.
OF_THIS_START = ("resume", "trainer.stop_after")


def _training_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Differences of what is trained, and how."""
    return {path: values for path, values in differences(before, now).items() if path not in OF_THIS_START}


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and set(value) == {DIGEST}:
        return f"content {value[DIGEST][:12]}"
    return json.dumps(value) if not isinstance(value, str) else value


def parent_of(point: ResumePoint, config: Mapping[str, Any]) -> ParentCheckpoint:
    """The checkpoint as the origin of a run with a configuration."""
    changes = _training_differences(point.state.get("config", {}), config)
    manifest = point.checkpoint.manifest
    return ParentCheckpoint(manifest.run_id, str(point.checkpoint.directory), point.step, changes)
