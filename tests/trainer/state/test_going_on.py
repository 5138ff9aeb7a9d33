"""A run that ended early goes on to the same end; when and in which form it saves; what is watched across a resume."""

import dataclasses
import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cases import exhaustive, short_where
from same_training import STEPS, course, digest, numbers
from trainer.runs import (
    BRIEF,
    BRIEF_GRPO,
    GRPO_ALGORITHM,
    JSONL,
    PPO_ALGORITHM,
    Prompts,
    every_step,
    fit,
    ppo_run,
    weights,
)
from trainer.test_sft import sft_run

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.data.base import DataSplits
from verl.engines.sharding import DDP, FSDP
from verl.errors import CheckpointWriteFailed
from verl.models.lora import LoRA
from verl.models.tiny import TinyModel
from verl.trainer.ppo import PPOTrainer
from verl.trainer.state.checkpointing import CheckpointSaver
from verl.trainer.state.lineage import ParentCheckpoint
from verl.trainer.state.save_directory import SaveDirectory


@pytest.fixture(scope="module")
def whole(model32, tmp_path_factory) -> Path:
    """An uninterrupted run with all its checkpoints."""
    directory = tmp_path_factory.mktemp("whole")
    assert fit(course(model32, directory), directory / "run").status == "finished"
    return directory


# When a run ends and goes on


@pytest.mark.slow
@pytest.mark.parametrize("way", ["time limit", *exhaustive("stop_after")])
def test_a_run_that_ends_early_by_itself_is_saved_and_goes_on_to_the_same_end(way, whole, model32, tmp_path):
    early = {"save": {"save_interval": None}}
    if way == "time limit":
        early["save"] |= {"time_limit_s": 100.0, "time_margin_s": 99.99}  # type: ignore
    result = fit(course(model32, tmp_path, **early, stop_after=2 if way == "stop_after" else None), tmp_path / "first")  # type: ignore
    ended_after = 2 if way == "stop_after" else 1
    assert (result.status, result.steps) == ("stopped", ended_after)
    assert result.checkpoints == [f"global_step_{ended_after}"]
    assert "Stopping" not in result.status
    result = fit(course(model32, tmp_path, resume="latest", save={"save_interval": None}), tmp_path / "second")
    assert (result.status, result.steps, result.checkpoints) == ("finished", STEPS, ["global_step_4"])
    assert digest(tmp_path) == digest(whole)
    assert result.samples == sum(int(x["perf/samples"]) for x in numbers(whole / "run").values())


def test_a_finished_run_has_nothing_left_to_do_and_says_so(model32, tmp_path, caplog):
    fit(course(model32, tmp_path, BRIEF_GRPO, total_steps=1, **BRIEF), tmp_path / "first")
    with caplog.at_level(logging.INFO):
        run = course(model32, tmp_path, BRIEF_GRPO, total_steps=1, resume="latest", **BRIEF)
        result = fit(run, tmp_path / "second")
    assert (result.status, result.steps, result.checkpoints) == ("finished", 1, [])
    assert "Nothing is left to do: the checkpoint is of step 1, and the run has 1." in caplog.text


# When a checkpoint is saved, and in which form


def test_each_new_best_is_saved_and_no_other(model32, tmp_path):
    best = {"save_interval": None, "save_best": "eval/score", "best_mode": "min"}
    result = fit(course(model32, tmp_path, eval_interval=1, save=best, lr=0.05, total_steps=6), tmp_path / "run")
    lowest, expected = float("inf"), []
    for step in range(1, 7):
        score = result.evaluations[step]["eval/score"]
        if score < lowest or step == 6:
            expected.append(f"global_step_{step}")
        lowest = min(lowest, score)
    assert result.checkpoints == expected
    assert 1 < len(expected) < 6, "the scores of this run tell nothing"


# What is watched across a resume


def saving_after(curve: list[float], differences: dict, tmp_path: Path) -> CheckpointSaver:
    """A run that goes on after such losses."""
    saving = CheckpointSaver(None, SaveDirectory(tmp_path, None), {}, {}, "actor/loss")

    class Point:
        step = len(curve)
        state = types.MappingProxyType({"learning_rate": 1e-5})

    saving.resumed, saving.parent = (  # type: ignore
        Point(),
        ParentCheckpoint("r0", "checkpoints/global_step_9", len(curve), differences),
    )
    saving.losses_before = curve
    return saving


def test_a_jump_of_the_first_losses_is_told_with_what_differs_and_a_smooth_curve_is_not(tmp_path):
    curve = [1.0 + 0.01 * (i % 3) for i in range(30)]
    saving = saving_after(curve, {"actor.optimizer.lr": [1e-3, 1.0]}, tmp_path)
    said = [saving.note(31 + i, {"actor/loss": 3.0}) for i in range(5)]
    assert said[:4] == [None] * 4
    assert said[4].startswith("actor/loss was 1.01 +- 0.0083 before the resume and is 3 in the first 5 steps after it.")  # type: ignore
    assert said[4].endswith("what differs is the configuration: actor.optimizer.lr.")  # type: ignore
    smooth = saving_after(curve, {}, tmp_path)
    assert [smooth.note(31 + i, {"actor/loss": 1.01}) for i in range(5)] == [None] * 5


def test_a_resume_under_another_schedule_tells_the_learning_rate_before_and_after(tmp_path):
    saving = saving_after([1.0], {"trainer.total_steps": [1, 9]}, tmp_path)
    assert saving.note(2, {"actor/loss": 1.0}) is None  # of a step that was skipped
    said = saving.note(2, {"actor/loss": 1.0, "actor/lr": 5e-5})
    assert "1e-05" in said  # type: ignore
    assert "5e-05" in said  # type: ignore
    assert "trainer.total_steps" in said  # type: ignore
    assert saving.note(3, {"actor/loss": 1.0, "actor/lr": 5e-5}) is None
    assert saving_after([1.0], {"trainer.seed": [0, 1]}, tmp_path).note(2, {"actor/lr": 5e-5}) is None


# Supervised fine-tuning


@pytest.mark.parametrize(
    "lora", [None, pytest.param(LoRA(rank=2), marks=pytest.mark.exhaustive)], ids=["all weights", "lora"]
)
def test_supervised_fine_tuning_goes_on_from_the_middle_of_an_epoch(lora, dir32, tmp_path):
    def run(directory, resume=None):
        described = sft_run(dir32, tmp_path, lora=lora)
        settings = dataclasses.replace(described.trainer, batch_size=2, total_epochs=1, save_final=False)
        return dataclasses.replace(described, trainer=settings, checkpoint=every_step(directory), resume=resume)

    first = fit(run(tmp_path / "whole"), tmp_path / "whole/run")
    second = fit(run(tmp_path, str(tmp_path / "whole/checkpoints/global_step_3")), tmp_path / "run")
    assert (first.steps, second.steps) == (4, 4)
    assert second.evaluations == first.evaluations
    assert digest(tmp_path) == digest(tmp_path / "whole")


# Epochs that steps do not divide


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
        return fit(dataclasses.replace(run, checkpoint=every_step(directory), resume=resume), directory / "run")

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


# On request: a file `save` in the run's directory, with or without a tag


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
    file, read = tmp_path / "save", Path.read_text

    def read_and_asked_again(path: Path, *options: str) -> str:
        found = read(path, *options)
        if found == "first":
            file.write_text("second")
        return found

    monkeypatch.setattr(Path, "read_text", read_and_asked_again)
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


# Files


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
