"""A resumed run is the uninterrupted one, bit by bit: from whichever step it goes on."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from cases import short_where
from same_training import STEPS, course, newest, numbers, same_training, saved
from trainer.runs import BRIEF, BRIEF_GRPO, GRPO_ALGORITHM, PPO_ALGORITHM, ShakenClip, fit

from verl.algorithms.kl import AdaptiveKLInReward
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.reader import open_verified
from verl.engines.sharding import DDP
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

ADAPTIVE = dataclasses.replace(PPO_ALGORITHM, kl=AdaptiveKLInReward(coef=0.2, target=0.1, horizon=40))
SHAKEN = dataclasses.replace(PPO_ALGORITHM, policy_loss=ShakenClip())
ALGORITHMS = {"ppo": ADAPTIVE, "grpo": GRPO_ALGORITHM, "lora": GRPO_ALGORITHM, "ddp": SHAKEN}
MANY = {"sharding": DDP(), "n_gpus_per_node": 2, "num_threads": 2}


def finished(name, model, directory: Path, **options) -> Path:
    """Where a run of this name has trained to its end, evaluated after every other step."""
    options["save"] = {"save_async": True, **options.pop("save", {})}
    run = course(model, directory, ALGORITHMS[name], eval_interval=2, **options, **(MANY if name == "ddp" else {}))
    lora = LoRA(rank=2) if name == "lora" else None
    result = fit(dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=lora)), directory / "run")
    assert (result.status, result.steps) == ("finished", STEPS)
    return directory


@pytest.mark.parametrize("name", short_where(ALGORITHMS, {"grpo"}.__contains__))
def test_a_run_resumed_from_any_step_ends_as_the_uninterrupted_one(name, model32, tmp_path):
    whole = finished(name, model32, tmp_path / "whole")
    assert list(numbers(whole / "run")) == list(range(1, STEPS + 1))
    for step in range(1, STEPS) if name in ("ppo", "lora") else (2,):
        point = whole / f"checkpoints/global_step_{step}"
        resumed = finished(name, model32, tmp_path / f"from_{step}", resume=point)
        same_training(saved(resumed), saved(whole), after=step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["lora", "ppo", "ddp"])
def test_a_run_goes_on_from_an_increment_as_the_uninterrupted_one(name, model32, tmp_path):
    increments = {"incremental_save": True}
    whole = finished(name, model32, tmp_path / "whole", save=increments)
    point = whole / "checkpoints/global_step_3"
    again = finished(name, model32, tmp_path / "again", save=increments, resume=point)
    same_training(saved(again), saved(whole), after=3)


@pytest.mark.slow
def test_saving_changes_no_number_and_both_ways_of_saving_write_the_same(model32, tmp_path):
    uninterrupted = finished("ppo", model32, tmp_path / "async")
    same_training(saved(finished("ppo", model32, tmp_path / "sync", save={"save_async": False})), saved(uninterrupted))
    off = course(model32, tmp_path / "off", ADAPTIVE, eval_interval=2)
    fit(dataclasses.replace(off, checkpoint=None), tmp_path / "off/run")
    assert numbers(tmp_path / "off/run") == numbers(uninterrupted / "run")
    assert not (tmp_path / "off/checkpoints").exists()


def test_the_actor_of_a_checkpoint_is_a_plain_hugging_face_directory(model32, tmp_path):
    fit(course(model32, tmp_path, BRIEF_GRPO, total_steps=2, save_final=True, **BRIEF), tmp_path / "run")
    latest = tmp_path / "checkpoints/latest"
    in_checkpoint = Pretrained(path=str(latest / "actor"))
    from_run = Pretrained(path=str(tmp_path / "run/actor")).load_causal_lm("cpu").state_dict()
    for key, value in in_checkpoint.load_causal_lm("cpu").state_dict().items():
        assert torch.equal(value, from_run[key])
    assert in_checkpoint.load_tokenizer().get_vocab() == model32.load_tokenizer().get_vocab()
    state = json.loads((latest / "trainer_state.json").read_text())
    assert state["step"] == 2
    assert [step for step, _ in state["loss_history"]] == [1, 2]
    assert all((latest / file).is_file() for file in state["rng_states"].values())
    assert state["lineage"]["parent"] is None


@pytest.mark.exhaustive
def test_frozen_models_are_named_and_on_request_kept_as_links(model32, tmp_path):
    one_at_a_time = {"save_async": False, "save_frozen": True}  # with two saves under way at once, both would copy
    fit(course(model32, tmp_path, ADAPTIVE, total_steps=2, save=one_at_a_time), tmp_path / "run")
    found = sorted((tmp_path / "checkpoints").glob("global_step_*/reference_model"))
    assert len(found) == 2
    identity = json.loads((found[0] / "identity.json").read_text())
    assert identity["model"] == model32.path
    assert len({(path / "model.safetensors").stat().st_ino for path in found}) == 1
    assert (found[0] / "model.safetensors").read_bytes() == (Path(model32.path) / "model.safetensors").read_bytes()
    open_verified(FileSystem(), newest(tmp_path).directory, "full")
