"""Every row is trained on once per epoch, whatever the size of a step, and a resume at the end of an epoch is exact."""

from __future__ import annotations

import dataclasses
import json

import pytest
from trainer.runs import BRIEF_GRPO, JSONL, Prompts, fit, ppo_run, weights

from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.data.base import DataSplits

TEN = Prompts(train=tuple(f"{i}+{i}=" for i in range(10)), eval=())
SIZES = {"prompts_per_step": 6, "total_epochs": 1, "save_final": True, "eval_before": False, "tracker": JSONL}


def test_ten_rows_in_steps_of_six_are_all_seen_and_the_start_says_how(model32, tmp_path, monkeypatch):
    run = ppo_run(model32, BRIEF_GRPO, data=TEN, critic=None, **SIZES)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        assert any("10 rows" in line and "next epoch" in line for line in trainer.saving.messages)
        seen, step = [], trainer.step
        noting = lambda batch, number: (seen.extend(batch["prompt_ids"].tolist()), step(batch, number))[1]  # noqa: E731
        monkeypatch.setattr(trainer, "step", noting)
        assert trainer.fit().steps == 2
    assert set(seen[:10]) == set(range(10))
    assert len(seen) == 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["filled", "earlier"])
def test_a_resume_at_the_end_of_an_epoch_comes_to_the_same_and_an_earlier_state_leaves_rows_out(
    kind, model32, tmp_path, monkeypatch
):
    run = ppo_run(model32, BRIEF_GRPO, data=TEN, critic=None, **SIZES | {"total_epochs": 3})
    if kind == "earlier":  # what a version without `fills` did and wrote
        load = DataSplits.__init__
        monkeypatch.setattr(DataSplits, "__init__", lambda self, *a, **k: load(self, *a, **k | {"fills_last": False}))

    def trained(directory, resume=None):
        saving = Checkpointing(
            save_dir=str(directory / "checkpoints"), save_interval=1, keep_last_n=None, save_async=False
        )
        described = dataclasses.replace(run, checkpoint=saving, resume=resume)
        return fit(described, directory / "run")

    whole = trained(tmp_path / "whole")
    monkeypatch.undo()
    assert whole.steps == (5 if kind == "filled" else 3)
    for step in range(1, whole.steps):
        point = tmp_path / f"whole/checkpoints/global_step_{step}"
        state = json.loads((point / "dataloader/state.json").read_text())
        assert ("fills" in state) == (kind == "filled")
        resumed = trained(tmp_path / str(step), str(point))
        assert resumed.steps == whole.steps
        mine, theirs = weights(tmp_path / str(step) / "run/actor"), weights(tmp_path / "whole/run/actor")
        assert all(mine[name].equal(theirs[name]) for name in theirs)
