"""A checkpoint on request: a file `save` in the run's directory, with or without a tag."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from trainer.runs import BRIEF, BRIEF_GRPO, fit, ppo_run

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.component import BuildContext
from verl.errors import CheckpointWriteFailed
from verl.trainer.ppo import PPOTrainer
from verl.trainer.state import checkpointing
from verl.trainer.state.checkpointing import CheckpointSaver


@pytest.mark.parametrize(
    ("tag", "named"),
    [
        pytest.param("loss_0.12", "loss_0.12", marks=pytest.mark.exhaustive),
        pytest.param("", "global_step_2", marks=pytest.mark.exhaustive),
        ("../x", "global_step_2"),
    ],
)
def test_it_is_saved_after_the_step_under_way(tag, named, model32, tmp_path, monkeypatch, caplog):
    plain = PPOTrainer.step

    def step(self, batch, number):
        if number == 2:
            (self.run_dir / "save").write_text(tag + "\n")
        return plain(self, batch, number)

    monkeypatch.setattr(PPOTrainer, "step", step)
    checkpoint = Checkpointing(save_dir=str(tmp_path / "saved"), save_interval=None)
    run = dataclasses.replace(ppo_run(model32, BRIEF_GRPO, total_steps=3, **BRIEF), checkpoint=checkpoint)
    fit(run, tmp_path / "run")
    names = [published.name for published in CheckpointDirectory(tmp_path / "saved").complete()]
    assert names == [named, "global_step_3"]
    assert not (tmp_path / "run/save").exists()
    assert ("no name" in caplog.text or "names a directory" in caplog.text) is (tag == "../x")


def test_a_save_that_fails_costs_itself_and_is_told_and_the_last_one_ends_the_run(model32, tmp_path, caplog):
    checkpoint = Checkpointing(save_dir=str(tmp_path / "saved"), save_interval=1, save_async=False)
    run = dataclasses.replace(ppo_run(model32, BRIEF_GRPO, total_steps=3, **BRIEF), checkpoint=checkpoint)
    plain, steps = PPOTrainer.step, []

    def step(self, batch, number):
        steps.append(number)
        saved = tmp_path / "saved"
        if number == 1:  # where checkpoints go there is no directory any more
            saved.rename(tmp_path / "aside")
            saved.write_text("")
        if number == 3:
            saved.unlink()
            (tmp_path / "aside").rename(saved)
        return plain(self, batch, number)

    with pytest.MonkeyPatch.context() as patched, run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        patched.setattr(PPOTrainer, "step", step)
        result = trainer.fit()
    assert steps == [1, 2, 3]
    assert result.checkpoints == ["global_step_3"]
    assert "The checkpoint of step 1 was NOT SAVED" in caplog.text


def saver_of(run_dir: Path, **fields: object) -> CheckpointSaver:
    """A saver as far as it deals with the directory of its run."""
    made = object.__new__(CheckpointSaver)
    vars(made).update(_writer=object(), _run_dir=run_dir, **fields)
    return made


def test_a_request_that_comes_while_another_is_read_is_not_lost(tmp_path, monkeypatch):
    file, read = tmp_path / "save", checkpointing.read_text

    def read_and_asked_again(path: Path, errors: str) -> str:
        found = read(path, errors)
        if found == "first":
            file.write_text("second")
        return found

    monkeypatch.setattr(checkpointing, "read_text", read_and_asked_again)
    file.write_text("first")
    saver = saver_of(tmp_path)
    assert [saver.asked_for() for _ in range(3)] == [(True, "first"), (True, "second"), (False, None)]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_which_a_checkpoint_is_saved_aside_is_locked_meanwhile(tmp_path, monkeypatch):
    look = "import sys, pathlib; from verl.checkpoint.ownership import RunLock as lock; "
    look += "print(lock.holder_of(pathlib.Path(sys.argv[1])))"
    seen = []

    def looked_at_by_another(self: CheckpointStore) -> None:
        command = [sys.executable, "-c", look, str(tmp_path / "aside")]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        raise CheckpointWriteFailed("enough")

    monkeypatch.setattr(CheckpointStore, "claim_directory", looked_at_by_another)
    saver = saver_of(tmp_path, settings=Checkpointing(), _config={}, uses=(), run_id="mine", identity={})
    with pytest.raises(CheckpointWriteFailed, match="enough"):
        saver.save_aside(tmp_path / "aside", 1, {}, {})
    assert seen[0].startswith("run mine: process ")
    assert not (tmp_path / "aside").exists()
