"""The CUDA path: the same steps as on the CPU, on the first GPU; skipped where there is none."""

import dataclasses

import pytest
import torch
from gpu.needs import gpus
from trainer.runs import JSONL, PPO_ALGORITHM, fit, ppo_run, read_lines, step_lines, weights, without_times

from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout

pytestmark = gpus()


def train(model, directory, **parts):
    settings = {"device": "cuda", "total_steps": 2, "tracker": JSONL, **parts}
    run = ppo_run(model, PPO_ALGORITHM, **settings)
    actor = dataclasses.replace(run.actor, lora=LoRA(rank=2), gradient_checkpointing=True, autocast="bfloat16")
    run = dataclasses.replace(run, actor=actor, rollout=HFRollout(max_new_tokens=7, top_p=0.9, top_k=20))
    fit(run, directory)
    lines = read_lines(directory / "metrics.jsonl")
    return [without_times(line) for line in lines], weights(directory)


def test_adapter_autocast_checkpointing_and_cut_sampling_train_and_repeat_themselves(dir32, tmp_path):
    first = train(Pretrained(path=str(dir32)), tmp_path / "first")
    second = train(Pretrained(path=str(dir32)), tmp_path / "second")
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_losses_on_the_gpu_are_those_on_the_cpu(dir64, tmp_path):
    found = {}
    for device in ("cpu", "cuda"):
        run = ppo_run(Pretrained(path=str(dir64), dtype="float64"), PPO_ALGORITHM, device=device, total_steps=2)
        run = dataclasses.replace(run, tracker=JSONL)
        fit(run, tmp_path / device)
        found[device] = step_lines(tmp_path / device)
    for cpu, gpu in zip(found["cpu"], found["cuda"], strict=True):
        assert gpu["actor/loss"] == pytest.approx(cpu["actor/loss"], abs=1e-8)
        assert gpu["critic/loss"] == pytest.approx(cpu["critic/loss"], abs=1e-8)
