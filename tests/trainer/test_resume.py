"""Resuming: which checkpoint is meant, what is refused, what may differ, and that what is saved when goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from trainer.runs import GRPO, PPO, Prompts, ppo_run, read_lines, without_times

from verl.checkpoint.discovery import CheckpointDirectory
from verl.checkpoint.reader import CheckpointReader
from verl.checkpoint.settings import Checkpointing
from verl.description import BuildContext
from verl.errors import BadCheckpoint, ConfigError
from verl.models.lora import LoRA
from verl.safety.bands import Band
from verl.tracking.jsonl import JsonLines
from verl.tracking.trackers import Trackers
from verl.trainer.lineage import Parent
from verl.trainer.resume import find
from verl.trainer.saving import Saving

STEPS = 4


def course(model, directory: Path, algorithm=GRPO, resume=None, save=None, **options):
    """A run of four steps that saves each of them, in `directory`."""
    saving = {"save_dir": str(directory / "checkpoints"), "save_interval": 1, "keep_last_n": None, "save_async": False}
    options = {"total_steps": STEPS, "tracker": Trackers(jsonl=JsonLines()), "save_final": False, **options}
    run = ppo_run(model, algorithm, **options)
    return dataclasses.replace(run, checkpoint=Checkpointing(**saving | (save or {})), resume=resume)


def fit(run, directory: Path):
    with run.build(BuildContext(run_dir=directory)) as trainer:
        return trainer.fit()


def newest(directory: Path):
    return CheckpointDirectory(directory / "checkpoints").newest()


def digest(directory: Path) -> str:
    return CheckpointReader(newest(directory)).digest()


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "actor/loss" in line]
    return {line["step"]: without_times(line) for line in lines}


@pytest.fixture(scope="module")
def whole(model32, tmp_path_factory) -> Path:
    """An uninterrupted run with all its checkpoints."""
    directory = tmp_path_factory.mktemp("whole")
    assert fit(course(model32, directory), directory / "run").status == "finished"
    return directory


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The same, to be changed, and in another place."""
    shutil.copytree(whole, tmp_path / "copied", symlinks=True)
    return tmp_path / "copied"


# Which checkpoint is meant


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("checkpoints", 4),
        ("checkpoints/", 4),
        ("checkpoints/latest", 4),
        ("checkpoints/latest/", 4),
        ("checkpoints/global_step_2", 2),
        ("checkpoints/global_step_2/", 2),
        ("run", 4),
        ("run/", 4),
    ],
)
def test_a_path_may_be_relative_or_end_in_a_slash_and_name_a_checkpoint_its_parent_or_a_run(
    given, step, whole, monkeypatch, tmp_path
):
    assert find(str(whole / given), tmp_path).step == step
    monkeypatch.chdir(whole)
    assert find(given, tmp_path).step == step
    assert find("./" + given, tmp_path).step == step


def test_a_run_means_its_own_checkpoints_and_not_those_of_a_later_run_in_the_same_directory(copied, model32):
    (copied / "run/checkpoints.json").unlink()  # it names the place that this was copied from
    first = str(copied / "checkpoints/global_step_1")
    fit(course(model32, copied, resume=first, stop_after=2), copied / "second")
    assert find("latest", copied / "checkpoints").step == 2  # published last
    assert find(str(copied / "second"), copied).published.name == "global_step_2-2"


def test_a_moved_directory_of_checkpoints_goes_on_where_it_lies(copied, whole, model32):
    for step in (3, 4):
        shutil.rmtree(copied / f"checkpoints/global_step_{step}")
    result = fit(course(model32, copied, resume="latest"), copied / "second")
    assert result.checkpoints == ["global_step_3", "global_step_4"]
    assert digest(copied) == digest(whole)


def test_latest_with_nothing_there_starts_fresh_and_says_so(model32, tmp_path, caplog):
    result = fit(course(model32, tmp_path, resume="latest", stop_after=1), tmp_path / "run")
    assert (result.status, result.steps) == ("stopped", 1)
    assert f"resume=latest found no checkpoint in {tmp_path / 'checkpoints'}: starting fresh." in caplog.text


def test_a_place_without_checkpoints_is_refused_in_words(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty'?: .*holds no complete checkpoint\. Give a checkpoint, its parent"):
        find(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(ConfigError, match="no such directory. Give a checkpoint, its parent, a run, or latest"):
        find(str(tmp_path / "absent"), tmp_path)


# What is damaged


def flip(file: Path) -> None:
    """One bit, in the middle of the tensors."""
    data = bytearray(file.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


@pytest.mark.parametrize("file", ["actor/model.safetensors", "optimizer/optim_state_rank_0.safetensors"])
def test_a_flipped_bit_is_told_with_file_and_tensor_and_the_checkpoint_before_is_taken(
    file, copied, whole, model32, caplog
):
    flip(copied / "checkpoints/global_step_4" / file)
    with caplog.at_level(logging.INFO):
        result = fit(course(model32, copied, resume="latest"), copied / "second")
    said = next(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert "NOT USING checkpoint" in said
    assert f"global_step_4: {file}: bytes" in said
    assert f"(in {file.partition('/')[0]}/" in said
    assert "step 3 (resume=latest looked in" in caplog.text
    assert (result.status, result.steps, result.checkpoints) == ("finished", 4, ["global_step_4-2"])
    assert digest(copied) == digest(whole)


def test_a_damaged_checkpoint_stops_where_strict_asks_for_it_or_where_it_is_named(copied, model32):
    flip(copied / "checkpoints/global_step_4/actor/model.safetensors")
    for resume, strict in (("latest", True), (str(copied / "checkpoints/global_step_4"), False)):
        with pytest.raises(
            BadCheckpoint, match=r"model\.safetensors: bytes .* are not those that were written \(in actor/"
        ):
            fit(course(model32, copied, resume=resume, save={"strict": strict}), copied / "second")


def test_nothing_starts_fresh_over_checkpoints_that_are_all_damaged(copied, model32):
    for step in range(1, STEPS + 1):
        flip(copied / f"checkpoints/global_step_{step}/actor/model.safetensors")
    with pytest.raises(ConfigError, match="finds damaged checkpoints in .* and no whole one"):
        fit(course(model32, copied, resume="latest"), copied / "second")


# What is refused, and what may differ


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"data": Prompts(train=("1+1=", "2+2=", "3+3=", "4+4="))}, ["data.train"]),
        ({"algorithm": PPO}, ["algorithm.advantage._target_", "algorithm.kl._target_", "algorithm.mini_batches"]),
    ],
)
def test_other_data_or_another_algorithm_is_refused_by_its_keys(options, keys, whole, model32, tmp_path):
    with pytest.raises(ConfigError) as refused:
        fit(course(model32, tmp_path, resume=str(whole / "checkpoints"), **options), tmp_path / "run")
    for key in keys:
        assert any(fault.startswith(f"{key} is ") for fault in refused.value.faults), refused.value.faults
    assert "was trained with" in str(refused.value)
    assert "this would be another training. Set it back, or start without resume." in str(refused.value)


def test_another_model_is_refused_even_under_the_same_path_and_the_same_one_under_another_is_not(
    whole, model32, dir32, tmp_path
):
    shutil.copytree(dir32, tmp_path / "model")
    moved = dataclasses.replace(model32, path=str(tmp_path / "model"))
    resume = str(whole / "checkpoints/global_step_3")
    assert fit(course(moved, tmp_path, resume=resume), tmp_path / "same").status == "finished"
    flip(tmp_path / "model/model.safetensors")
    with pytest.raises(ConfigError, match=r"actor\.model\.path is content \w{12}: .* trained with content \w{12}, so"):
        fit(course(moved, tmp_path, resume=resume), tmp_path / "other")


def test_a_changed_learning_rate_is_logged_recorded_and_used(whole, model32, tmp_path, caplog):
    resume = str(whole / "checkpoints/global_step_2")
    fit(course(model32, tmp_path, resume=resume, lr=1e-3), tmp_path / "run")
    assert "differs from the resumed run: actor.optimizer.lr: 0.003 before, 0.001 now" in caplog.text
    assert "differs from the resumed run: resume" not in caplog.text
    state = json.loads((newest(tmp_path).directory / "trainer_state.json").read_text())
    assert state["lineage"]["parent"]["step"] == 2
    assert state["lineage"]["parent"]["differences"]["actor.optimizer.lr"] == [0.003, 0.001]
    before, now = numbers(whole / "run")[3], numbers(tmp_path / "run")[3]
    assert now["actor/lr"] == pytest.approx(before["actor/lr"] / 3)


# When a run ends and goes on


@pytest.mark.parametrize("way", ["time limit", "stop_after"])
def test_a_run_that_ends_early_by_itself_is_saved_and_goes_on_to_the_same_end(way, whole, model32, tmp_path):
    early = {"save": {"save_interval": None}}
    if way == "time limit":
        early["save"] |= {"time_limit_s": 100.0, "time_margin_s": 99.99}
    result = fit(course(model32, tmp_path, **early, stop_after=2 if way == "stop_after" else None), tmp_path / "first")
    ended_after = 2 if way == "stop_after" else 1
    assert (result.status, result.steps) == ("stopped", ended_after)
    assert result.checkpoints == [f"global_step_{ended_after}"]
    assert "Stopping" not in result.status
    result = fit(course(model32, tmp_path, resume="latest", save={"save_interval": None}), tmp_path / "second")
    assert (result.status, result.steps, result.checkpoints) == ("finished", STEPS, ["global_step_4"])
    assert digest(tmp_path) == digest(whole)
    assert result.samples == sum(int(x["perf/samples"]) for x in numbers(whole / "run").values())


def test_a_run_cut_at_the_boundary_of_an_epoch_begins_the_next_one(model32, tmp_path):
    by_epochs = {"total_steps": None, "total_epochs": 2, "prompts_per_step": 4, "algorithm": PPO}  # two steps an epoch
    fit(course(model32, tmp_path / "whole", **by_epochs), tmp_path / "whole/run")
    resume = str(tmp_path / "whole/checkpoints/global_step_2")
    state = json.loads(Path(resume, "dataloader/state.json").read_text())
    assert (state["epoch"], state["position"]) == (1, 0)
    fit(course(model32, tmp_path, resume=resume, **by_epochs), tmp_path / "run")
    assert numbers(tmp_path / "run") == {k: v for k, v in numbers(tmp_path / "whole/run").items() if k > 2}
    assert digest(tmp_path) == digest(tmp_path / "whole")


def test_a_finished_run_has_nothing_left_to_do_and_says_so(copied, model32, caplog):
    with caplog.at_level(logging.INFO):
        result = fit(course(model32, copied, resume="latest"), copied / "second")
    assert (result.status, result.steps, result.checkpoints) == ("finished", STEPS, [])
    assert "Nothing is left to do: the checkpoint is of step 4, and the run has 4." in caplog.text


def test_the_first_batch_that_is_repeated_stays_the_first_after_a_resume(model32, tmp_path):
    again = {"repeat_first_batch": True}
    fit(course(model32, tmp_path / "whole", **again), tmp_path / "whole/run")
    resume = str(tmp_path / "whole/checkpoints/global_step_1")
    fit(course(model32, tmp_path, resume=resume, **again), tmp_path / "run")
    assert digest(tmp_path) == digest(tmp_path / "whole")


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


def test_saving_by_the_clock_saves_at_the_next_step(model32, tmp_path):
    every = {"save_interval": None, "save_interval_s": 1e-6}
    assert len(fit(course(model32, tmp_path / "a", save=every), tmp_path / "a/run").checkpoints) == STEPS
    every["save_interval_s"] = 1e6
    assert fit(course(model32, tmp_path / "b", save=every), tmp_path / "b/run").checkpoints == ["global_step_4"]


@pytest.mark.parametrize("kind", ["lora", "critic"])
def test_weights_saved_for_older_tools_resume_to_the_same_numbers(kind, model32, tmp_path):
    def run(directory, **options):
        chosen = course(model32, directory, PPO if kind == "critic" else GRPO, **options)
        if kind == "critic":
            return chosen
        return dataclasses.replace(chosen, actor=dataclasses.replace(chosen.actor, lora=LoRA(rank=2)))

    old = {"use_safetensors": False}
    fit(run(tmp_path / "whole", save=old), tmp_path / "whole/run")
    point = tmp_path / "whole/checkpoints/global_step_2"
    file = point / "actor" / ("adapter_model.bin" if kind == "lora" else "pytorch_model.bin")
    assert torch.load(file, weights_only=True)
    assert not list((point / "actor").glob("*.safetensors"))
    fit(run(tmp_path, resume=str(point), save=old), tmp_path / "run")
    assert numbers(tmp_path / "run") == {k: v for k, v in numbers(tmp_path / "whole/run").items() if k > 2}
    assert digest(tmp_path) == digest(tmp_path / "whole")


# What is watched across a resume


def saving_after(curve: list[float], differences: dict, tmp_path: Path) -> Saving:
    """A run that goes on after such losses."""
    saving = Saving(None, tmp_path, {}, {}, "actor/loss")

    class Point:
        step = len(curve)

    saving.resumed, saving.parent = Point(), Parent("r0", "checkpoints/global_step_9", len(curve), differences)
    saving._before = curve
    return saving


def test_a_jump_of_the_first_losses_is_told_with_what_differs_and_a_smooth_curve_is_not(tmp_path):
    curve = [1.0 + 0.01 * (i % 3) for i in range(30)]
    saving = saving_after(curve, {"actor.optimizer.lr": [1e-3, 1.0]}, tmp_path)
    said = [saving.note(31 + i, {"actor/loss": 3.0}) for i in range(5)]
    assert said[:4] == [None] * 4
    assert said[4].startswith("actor/loss was 1.01 +- 0.0083 before the resume and is 3 in the first 5 steps after it.")
    assert said[4].endswith("what differs is the configuration: actor.optimizer.lr.")
    smooth = saving_after(curve, {}, tmp_path)
    assert [smooth.note(31 + i, {"actor/loss": 1.01}) for i in range(5)] == [None] * 5


def test_a_resumed_run_watches_its_metrics_with_the_history_that_it_had(model32, whole, tmp_path):
    state = json.loads((whole / "checkpoints/global_step_3/scheduler/state.json").read_text())["safety"]
    losses = [abs(x["actor/loss"]) for step, x in numbers(whole / "run").items() if step <= 3]
    assert state["bands"]["actor/loss"] == {"sizes": losses, "is_beyond": False}
    run = course(model32, tmp_path, resume=str(whole / "checkpoints/global_step_3"))
    fit(run, tmp_path / "run")
    after = json.loads((newest(tmp_path).directory / "scheduler/state.json").read_text())["safety"]
    assert len(after["bands"]["actor/loss"]["sizes"]) == 4


def test_a_band_goes_on_where_another_one_was():
    first, second = (Band("loss", factor=10.0, history=3, window=5) for _ in range(2))
    for value in (1.0, 1.1, 0.9, 50.0):
        first.add(value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.add(60.0) is None  # beyond already, and told
    assert second.state_dict()["sizes"] == [1.0, 1.1, 0.9, 50.0, 60.0]
