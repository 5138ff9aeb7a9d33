"""Which checkpoint `resume` means, what is done about a damaged one, what is refused, and what may differ."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from cases import exhaustive
from refusals import refusal
from same_training import STEPS, course, digest, newest, numbers
from trainer.runs import PPO_ALGORITHM, Prompts, fit
from trainer.state import test_going_on

from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import commit_line
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.resolve import resolve
from verl.component import BuildContext
from verl.errors import BadCheckpoint, ConfigError
from verl.ops.cpu_matmul import chosen_library
from verl.rewards.function import RewardFunction
from verl.trainer.state.checkpointing import CheckpointSaver
from verl.trainer.state.save_directory import SaveDirectory

whole = test_going_on.whole  # a fixture


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The same, to be changed, and in another place."""
    shutil.copytree(whole, tmp_path / "copied", symlinks=True)
    return tmp_path / "copied"


# Which checkpoint is meant


def test_latest_with_nothing_there_starts_fresh_and_says_so(model32, tmp_path, caplog):
    result = fit(course(model32, tmp_path, resume="latest", stop_after=1), tmp_path / "run")
    assert (result.status, result.steps) == ("stopped", 1)
    where = tmp_path / "checkpoints"
    assert f"resume=latest found no checkpoint in {where}: starting from the beginning." in caplog.text


# What is damaged


def flip(file: Path) -> None:
    """One bit, in the middle of the tensors."""
    data = bytearray(file.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["actor/model.safetensors", *exhaustive("optimizer/optim_state_rank_0.safetensors")])
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
        (
            {"algorithm": PPO_ALGORITHM},
            ["algorithm.advantage._target_", "algorithm.kl._target_", "algorithm.mini_batches"],
        ),
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


# What a run's directory leads to


def checkpoint_at(copied):
    found = resolve(str(copied / "run"), copied / "nowhere")
    assert found is not None
    return found.checkpoint


def test_a_run_that_was_moved_with_its_checkpoints_is_found_where_it_lies_now_and_one_without_them_is_told(
    copied, whole
):
    assert checkpoint_at(copied).directory.parent == whole / "checkpoints"
    record = json.loads((copied / "run/checkpoints.json").read_text())
    record["save_dir"] = "/was/once/checkpoints"
    (copied / "run/checkpoints.json").write_text(json.dumps(record))
    assert checkpoint_at(copied).directory == copied / "checkpoints/global_step_4"
    (copied / "deep/er").mkdir(parents=True)
    shutil.move(copied / "run", copied / "deep/er/run")
    with refusal("resume") as refused:
        resolve(str(copied / "deep/er/run"), copied)
    assert "saved in /was/once/checkpoints" in str(refused.value)


@pytest.mark.parametrize("given", ["", " ", "s3://", "http://x/y"])
def test_a_resume_that_names_nothing_is_refused_and_looks_nowhere(given, whole, monkeypatch, tmp_path):
    monkeypatch.chdir(whole / "checkpoints")
    with refusal("resume"):
        resolve(given, tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"save_dir": 3, "run_id": "x"}', '{"save_dir": "a", "run_id": []}']
)
def test_a_pointer_that_is_none_is_told(content, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints.json").write_text(content)
    with pytest.raises(ConfigError, match="does not say where a run saves"):
        resolve(str(tmp_path / "run"), tmp_path)


# The loss curve that a checkpoint keeps


def test_a_checkpoint_of_a_run_answers_its_losses(whole):
    manager, written = CheckpointManager(whole / "checkpoints"), numbers(whole / "run")
    assert manager.loss_history == [{"step": step, "loss": one["actor/loss"]} for step, one in written.items()]
    assert manager.get_loss() == written[STEPS]["actor/loss"]


def test_a_loss_that_is_no_number_is_no_point_of_the_curve_nor_one_that_an_earlier_version_saved(whole):
    point = resolve(str(whole / "checkpoints"), whole)
    assert point is not None
    history = [[step, "nan" if step % 7 == 0 else 1.0 + 0.01 * (step % 3)] for step in range(1, 41)]
    earlier = dataclasses.replace(point, state={**point.state, "loss_history": history})
    saver = CheckpointSaver(None, SaveDirectory(whole, None, resumed=earlier), {}, {}, "actor/loss")
    assert saver.note(earlier.step + 1, {"actor/loss": float("nan")}) is None
    first = [saver.note(earlier.step + k, {"actor/loss": 30.0}) for k in range(1, 6)]
    assert first[:4] == [None] * 4
    assert "actor/loss was 1.01 +- 0.0" in (first[4] or "")


# What is told of a resume, and what is not


@pytest.mark.slow
def test_an_edited_source_other_threads_and_products_are_told_and_where_a_run_ends_is_not(model32, tmp_path, caplog):
    rule = tmp_path / "rule.py"
    rule.write_text("def rate(prompts, responses):\n    return [float(len(r)) for r in responses]\n")
    reward = RewardFunction(path=f"{rule}:rate")
    fit(course(model32, tmp_path, reward=reward, stop_after=1), tmp_path / "first")
    fit(course(model32, tmp_path, reward=reward, resume="latest", stop_after=2), tmp_path / "second")
    assert "differs from the resumed run" not in caplog.text
    rule.write_text("def rate(prompts, responses):\n    return [-float(len(r)) for r in responses]\n")
    other = "mkl" if chosen_library("auto") == "onednn" else "onednn"
    file = copied_state(tmp_path / "checkpoints/global_step_2", num_threads=7, cpu_matmul=other)
    assert file.is_file()
    fit(course(model32, tmp_path, reward=reward, resume="latest", stop_after=3), tmp_path / "third")
    said = [record.getMessage() for record in caplog.records if "differs from" in record.getMessage()]
    assert [line.removeprefix("differs from the resumed run: ") for line in said] == [
        f"reward.path: the source of {rule}:rate was edited since the save",
        "threads of torch: 7 before, 1 now. Sums may be rounded otherwise; set trainer.num_threads=7 for the same "
        "numbers",
        f"float32 products on the CPU: by {other} before, by {chosen_library('auto')} now. Last bits differ; set "
        f"trainer.cpu_matmul={other} for the same numbers",
    ]


@pytest.mark.slow
def test_a_resumed_run_keeps_measured_threads(model32, tmp_path, monkeypatch):
    fit(course(model32, tmp_path, stop_after=1), tmp_path / "first")
    copied_state(tmp_path / "checkpoints/global_step_1", num_threads=3)
    threads = torch.get_num_threads()
    run = course(model32, tmp_path, resume="latest", stop_after=2, num_threads="auto")
    with run.build(BuildContext(run_dir=tmp_path / "second")):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == threads


def copied_state(checkpoint: Path, **changed: object) -> Path:
    """Give a checkpoint another `trainer_state.json`, for which it vouches."""
    state, manifest = (json.loads((checkpoint / name).read_text()) for name in ("trainer_state.json", "manifest.json"))
    data = json.dumps({**state, **changed}).encode()
    (entry,) = [entry for entry in manifest["files"] if entry["path"] == "trainer_state.json"]
    entry |= {"size": len(data), "blake3": digest_of(data), "leaves": [[len(data), digest_of(data)]]}
    (checkpoint / "trainer_state.json").write_bytes(data)
    signed = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(signed)
    (checkpoint / "COMMIT").write_bytes(commit_line(signed))
    return checkpoint / "trainer_state.json"
