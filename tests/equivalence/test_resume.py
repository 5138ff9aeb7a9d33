"""A resumed run is the uninterrupted one, bit by bit: from whichever step it goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from cases import short_where
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ShakenClip, ppo_run, read_lines, without_times

from verl.algorithms.kl import AdaptiveKLInReward
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.read.verify import verify
from verl.component import BuildContext
from verl.engines.sharding import DDP
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.tracking.base import Trackers
from verl.tracking.jsonl import JsonLines

STEPS = 5
ADAPTIVE = dataclasses.replace(PPO_ALGORITHM, kl=AdaptiveKLInReward(coef=0.2, target=0.1, horizon=40))
SHAKEN = dataclasses.replace(PPO_ALGORITHM, policy_loss=ShakenClip())


def course(name, model, directory, **options):
    """A run of five steps that saves each of them."""
    checkpoint = Checkpointing(
        save_dir=str(directory / "checkpoints"), save_interval=1, keep_last_n=None,
        save_async=options.pop("wait", True), incremental_save=options.pop("increments", False),
    )  # fmt: skip
    resume = options.pop("resume", None)
    algorithm = {"ppo": ADAPTIVE, "grpo": GRPO_ALGORITHM, "lora": GRPO_ALGORITHM, "ddp": SHAKEN}[name]
    tracker = Trackers(jsonl=JsonLines())
    run = ppo_run(model, algorithm, total_steps=STEPS, eval_interval=2, tracker=tracker, **options)
    if name == "lora":
        run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=LoRA(rank=2)))
    if name == "ddp":
        settings = dataclasses.replace(run.trainer, n_gpus_per_node=2, num_threads=2)
        run = dataclasses.replace(run, sharding=DDP(), trainer=settings)
    return dataclasses.replace(run, checkpoint=checkpoint, resume=resume)


def fit(run, directory: Path):
    with run.build(BuildContext(run_dir=directory / "run")) as trainer:
        return trainer.fit()


def final_digest(directory: Path) -> str:
    newest = CheckpointDirectory(directory / "checkpoints").newest()
    assert newest.step == STEPS
    return CheckpointReader(newest).digest()


def numbers(directory: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, times aside."""
    lines = [line for line in read_lines(directory / "run/metrics.jsonl") if "actor/loss" in line]
    return {line["step"]: without_times(line) for line in lines}


@pytest.mark.parametrize("name", short_where(["ppo", "grpo", "lora", "ddp"], {"grpo"}.__contains__))
def test_a_run_resumed_from_any_step_ends_as_the_uninterrupted_one(name, model32, tmp_path):
    fit(course(name, model32, tmp_path / "whole"), tmp_path / "whole")
    whole = numbers(tmp_path / "whole")
    assert list(whole) == list(range(1, STEPS + 1))
    for step in range(1, STEPS) if name != "ddp" else (2,):
        directory = tmp_path / f"from_{step}"
        point = tmp_path / f"whole/checkpoints/global_step_{step}"
        result = fit(course(name, model32, directory, resume=str(point)), directory)
        assert (result.status, result.steps) == ("finished", STEPS)
        assert numbers(directory) == {k: v for k, v in whole.items() if k > step}
        assert final_digest(directory) == final_digest(tmp_path / "whole")


@pytest.mark.parametrize(
    "name", ["lora", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ppo", "ddp"))]
)
def test_a_run_goes_on_from_an_increment_as_the_uninterrupted_one(name, model32, tmp_path):
    fit(course(name, model32, tmp_path / "whole", increments=True), tmp_path / "whole")
    point = tmp_path / "whole/checkpoints/global_step_3"
    fit(course(name, model32, tmp_path / "again", increments=True, resume=str(point)), tmp_path / "again")
    assert numbers(tmp_path / "again") == {k: v for k, v in numbers(tmp_path / "whole").items() if k > 3}
    assert final_digest(tmp_path / "again") == final_digest(tmp_path / "whole")


def test_saving_changes_no_number_and_both_ways_of_saving_write_the_same(model32, tmp_path):
    for way, wait in (("async", True), ("sync", False)):
        fit(course("ppo", model32, tmp_path / way, wait=wait), tmp_path / way)
    fit(dataclasses.replace(course("ppo", model32, tmp_path / "off"), checkpoint=None), tmp_path / "off")
    assert numbers(tmp_path / "async") == numbers(tmp_path / "sync") == numbers(tmp_path / "off")
    assert final_digest(tmp_path / "async") == final_digest(tmp_path / "sync")
    assert not (tmp_path / "off/checkpoints").exists()


def test_the_actor_of_a_checkpoint_is_a_plain_hugging_face_directory(model32, tmp_path):
    fit(course("ppo", model32, tmp_path), tmp_path)
    latest = tmp_path / "checkpoints/latest"
    saved = Pretrained(path=str(latest / "actor"))
    from_run = Pretrained(path=str(tmp_path / "run/actor")).load_causal_lm("cpu").state_dict()
    for key, value in saved.load_causal_lm("cpu").state_dict().items():
        assert torch.equal(value, from_run[key])
    assert saved.load_tokenizer().get_vocab() == model32.load_tokenizer().get_vocab()
    state = json.loads((latest / "trainer_state.json").read_text())
    assert state["step"] == STEPS
    assert [step for step, _ in state["loss_history"]] == list(range(1, STEPS + 1))
    assert all((latest / file).is_file() for file in state["rng_states"].values())
    assert state["lineage"]["parent"] is None


def test_frozen_models_are_named_and_on_request_kept_as_links(model32, tmp_path):
    run = course("ppo", model32, tmp_path, wait=False)  # with two saves under way at once, both would copy
    kept = dataclasses.replace(run.checkpoint, save_frozen=True)
    fit(dataclasses.replace(run, checkpoint=kept), tmp_path)
    found = sorted((tmp_path / "checkpoints").glob("global_step_*/reference_model"))
    assert len(found) == STEPS
    identity = json.loads((found[0] / "identity.json").read_text())
    assert identity["model"] == model32.path
    assert len({(path / "model.safetensors").stat().st_ino for path in found}) == 1
    assert (found[0] / "model.safetensors").read_bytes() == (Path(model32.path) / "model.safetensors").read_bytes()
    newest = CheckpointDirectory(tmp_path / "checkpoints").newest()
    assert verify(FileSystem(), newest.directory, "full") == []
