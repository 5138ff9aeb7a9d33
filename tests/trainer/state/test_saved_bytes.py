"""The files of a checkpoint are the same bytes whether the run was stopped and resumed on the way or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cases import short_where
from same_training import course
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, fit

from verl.engines.sharding import DDP, FSDP
from verl.models.lora import LoRA
from verl.models.tiny import TinyModel

CHANGING = {"trainer_state.json", "manifest.json", "COMMIT"}  # times, and what the run is called


def files(checkpoint: Path) -> dict[str, bytes]:
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name not in CHANGING]
    return {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in paths}


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"algorithm": PPO_ALGORITHM},
    "shards": {"algorithm": PPO_ALGORITHM, "save": {"max_shard_gib": 3e-5}},
    "bin": {"algorithm": PPO_ALGORITHM, "save": {"use_safetensors": False}},
    "built": {"algorithm": PPO_ALGORITHM, "model": TinyModel(), "save": {"max_shard_gib": 1e-4}},
    "built, bin": {"algorithm": GRPO_ALGORITHM, "model": TinyModel(), "save": {"use_safetensors": False}},
    "adapter": {"algorithm": GRPO_ALGORITHM, "lora": LoRA(rank=2)},
    "adapter, bin": {"algorithm": GRPO_ALGORITHM, "lora": LoRA(rank=2), "save": {"use_safetensors": False}},
    "ddp": {"algorithm": GRPO_ALGORITHM, "sharding": DDP(), "n_gpus_per_node": 2},
    "fsdp": {"algorithm": GRPO_ALGORITHM, "sharding": FSDP(), "n_gpus_per_node": 2, "save": {"max_shard_gib": 3e-5}},
}


def of_way(model: Any, directory: Path, way: str, **options: Any) -> Any:
    chosen = {**WAYS[way], **options}
    lora = chosen.pop("lora", None)
    run = course(chosen.pop("model", model), directory, **chosen)
    return dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=lora))


@pytest.mark.slow
@pytest.mark.parametrize("way", short_where(WAYS, {"built, bin"}.__contains__))
def test_every_file_of_a_resumed_run_is_bit_by_bit_that_of_one_that_was_never_stopped(way, model32, tmp_path):
    fit(of_way(model32, tmp_path / "straight", way), tmp_path / "straight/run")
    fit(of_way(model32, tmp_path / "cut", way, stop_after=2), tmp_path / "cut/first")
    fit(of_way(model32, tmp_path / "cut", way, resume="latest", stop_after=3), tmp_path / "cut/second")
    fit(of_way(model32, tmp_path / "cut", way, resume="latest"), tmp_path / "cut/third")
    straight, cut = (files(tmp_path / name / "checkpoints/global_step_4") for name in ("straight", "cut"))
    assert straight.keys() == cut.keys()
    assert [name for name in straight if straight[name] != cut[name]] == []
