"""What the options of debug/ do in a run: plant a fault, repeat a batch, profile."""

import dataclasses
import json

import pytest
import torch
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, JSONL, Prompts, fit, ppo_run, read_lines
from trainer.test_sft import sft_run

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.engines.sharding import DDP
from verl.protocol import DataProto
from verl.trainer.timers import Profile


def settings_of(debug: str, root: str = "ppo"):
    return validate(compose_root(root, [f"debug={debug}"])).trainer


def in_small(model, debug: str, **changes):
    """A small run with those settings of the option that are its own."""
    names = ("total_steps", "eval_before", "eval_interval", "save_final", "repeat_first_batch", "profile", "safety")
    settings = {name: getattr(settings_of(debug), name) for name in names}
    return ppo_run(model, GRPO_ALGORITHM, critic=None, data=Prompts(eval=()), tracker=JSONL, **(settings | changes))


@pytest.mark.slow
def test_a_planted_nan_is_skipped_told_and_kept(model32, tmp_path):
    result = fit(in_small(model32, "nan"), tmp_path)
    assert (result.status, result.steps) == ("finished", 4)
    skipped = [line.get("safety/skipped_updates") for line in read_lines(tmp_path / "metrics.jsonl")]
    assert skipped == [None, 3, None, None]
    kept = list((tmp_path / "anomalies").iterdir())
    assert [len(DataProto.load(directory / "batch.safetensors")) for directory in kept] == [
        2,
        2,
        2,
    ]  # whole mini-batches


@pytest.mark.exhaustive
def test_overfitting_takes_the_same_prompts_in_every_step_and_learns_them(dir32, model32, tmp_path):
    seen = []
    with in_small(model32, "overfit", total_steps=3).build(BuildContext(run_dir=tmp_path)) as trainer:
        step = trainer.step
        trainer.step = lambda batch, number: seen.append(batch["prompt_ids"]) or step(batch, number)  # type: ignore
        trainer.fit()
    assert len(seen) == 3
    assert all(torch.equal(ids, seen[0]) for ids in seen)

    run = sft_run(dir32, tmp_path)
    overfit = dataclasses.replace(run.trainer, repeat_first_batch=True, total_steps=40, total_epochs=None)
    result = fit(dataclasses.replace(run, trainer=overfit, tracker=JSONL), tmp_path / "sft")
    losses = [line["sft/loss"] for line in read_lines(tmp_path / "sft" / "metrics.jsonl") if "sft/loss" in line]
    assert result.steps == 40
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.exhaustive
def test_profiling_writes_a_table_and_a_trace_and_changes_no_number(model32, tmp_path):
    fit(in_small(model32, "profile"), tmp_path / "with")
    fit(in_small(model32, "profile", profile=None), tmp_path / "without")
    table = (tmp_path / "with" / "profile" / "table.txt").read_text()
    assert "Self CPU" in table
    assert "aten::addmm" in table
    trace = json.loads((tmp_path / "with" / "profile" / "trace.json").read_text())
    assert len(trace["traceEvents"]) > 1000
    losses = [
        [line["actor/loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in ("with", "without")
    ]
    assert losses[0] == losses[1]
    assert not (tmp_path / "without" / "profile").exists()


def test_profiling_of_other_processes_is_refused_by_name(model32):
    with refusal("trainer.profile"):
        ppo_run(model32, profile=Profile(), sharding=DDP(), n_gpus_per_node=2)
    with refusal("first_step"):
        Profile(first_step=0)
