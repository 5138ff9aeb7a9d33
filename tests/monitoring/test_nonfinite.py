"""Faults planted in real runs: what stops, what is skipped, what is left as it was, and what is written about it."""

import copy
import dataclasses
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each_value_once, exhaustive, short_where
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from trainer.runs import (
    GRPO_ALGORITHM,
    JSONL,
    PPO_ALGORITHM,
    Arbitrary,
    Prompts,
    fit,
    ppo_run,
    read_lines,
    weights,
    without_times,
)
from trainer.test_sft import sft_run

from verl.algorithms.advantages import AdvantageEstimator
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.component import BuildContext, MaybeInfinite, component
from verl.engines.optimizer import AdamW
from verl.engines.sharding import DDP
from verl.errors import NonFiniteError, RewardError
from verl.models.pretrained import Pretrained
from verl.monitoring.config import Monitoring
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult
from verl.rollout.base import GenerationRequest
from verl.workers.critic import Critic

pytestmark = pytest.mark.xdist_group("two processes")
QUICK: dict[str, Any] = {"eval_before": False, "save_final": False, "data": Prompts(eval=()), "tracker": JSONL}

SHARDINGS: dict[str, dict[str, Any]] = {"none": {}, "ddp": {"sharding": DDP(timeout_s=60.0), "n_gpus_per_node": 2}}


@component
class WrongAt(RewardDescription):
    """Arbitrary scores, but `value` for the second row at some of the calls.

    Args:
        checked: the value passes through the check of a function's results, and not straight into the batch.
    """

    calls: tuple[int, ...]
    value: MaybeInfinite
    checked: bool = True

    def build(self, context: BuildContext) -> Reward:
        return WrongReward(self)


class WrongReward(Reward):
    def __init__(self, options: WrongAt):
        self.options, self.count = options, 0

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        self.count += 1
        scores = Arbitrary().score(prompts, responses)
        if self.count in self.options.calls:
            scores[1] = self.options.value
        return scores

    def score_batch(self, batch: DataProto) -> RewardResult:
        if self.options.checked:
            return super().score_batch(batch)
        return RewardResult(np.array(self.score(list(batch["prompt_text"]), list(batch["response_text"]))))


def steps_of(directory: Path) -> list[dict]:
    return read_lines(directory / "metrics.jsonl")


def skipping(**options: Any) -> Monitoring:
    return Monitoring(on_non_finite="skip", **options)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("value", "checked"),
    each_value_once({"nan": math.nan, "inf": math.inf}, {"by a function": True, "past the check": False}),
)
def test_a_reward_that_is_not_finite_stops_the_run_with_the_batch(model32, tmp_path, value, checked):
    reward, error = WrongAt(calls=(2,), value=value, checked=checked), RewardError if checked else NonFiniteError
    with pytest.raises(error, match="Sample: 1" if checked else r"(?s)at row 1.*anomalies/step_2_reward"):
        fit(ppo_run(model32, GRPO_ALGORITHM, reward=reward, critic=None, total_steps=3, **QUICK), tmp_path)
    for directory in [] if checked else (tmp_path / "anomalies").iterdir():
        batch = DataProto.load(directory / "batch.safetensors")
        assert len(batch["response_text"]) == 6
        readme = (directory / "README.md").read_text()
        assert f'DataProto.load("{directory}/batch.safetensors")' in readme
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert len(steps_of(tmp_path)) == 1


@component
class Exponential(AdvantageEstimator):
    """An estimator that overflows where a reward is large."""

    def __call__(self, batch: DataProto) -> DataProto:
        mask, rewards = batch["response_mask"], batch["token_level_rewards"].sum(dim=1, keepdim=True)
        credit = torch.where(mask, torch.exp(rewards), 0.0)
        return DataProto.from_dict({"advantages": credit, "returns": credit})


def test_credit_that_overflows_stops_the_run_before_it_is_trained_on(model32, tmp_path):
    reward, algorithm = WrongAt(calls=(2,), value=1e3), dataclasses.replace(PPO_ALGORITHM, advantage=Exponential())
    with pytest.raises(NonFiniteError, match="Step 2: not finite: advantages at row 1"):
        fit(ppo_run(model32, algorithm, reward=reward, total_steps=3, safety=skipping(), **QUICK), tmp_path)


def test_too_many_skips_in_a_row_stop_the_run_after_all(model32, tmp_path):
    safety = skipping(max_skips=1, plant_nan_at=2)
    with pytest.raises(NonFiniteError, match="step_2_critic_2"):
        fit(ppo_run(model32, PPO_ALGORITHM, total_steps=3, safety=safety, **QUICK), tmp_path)


def test_a_selection_of_groups_never_sees_a_reward_that_is_not_finite(model32, tmp_path):
    algorithm = dataclasses.replace(GRPO_ALGORITHM, selection=DynamicSampling(on_none="skip"), mini_batches=1)
    reward = WrongAt(calls=(1,), value=math.nan, checked=False)
    with pytest.raises(NonFiniteError, match="token_level_scores at row 1"):
        fit(ppo_run(model32, algorithm, critic=None, reward=reward, total_steps=1, **QUICK), tmp_path)


def broken(directory: Path, source: Path) -> Pretrained:
    """A model one of whose weights is nan."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "layers.1" in name and "mlp" in name)
    tensors[name][0, 0] = math.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return Pretrained(path=str(directory))


@pytest.mark.parametrize("sharding", short_where(SHARDINGS, "none".__eq__))
def test_weights_that_are_not_finite_stop_the_run_and_skipping_does_not_hide_them(model32, dir32, tmp_path, sharding):
    critic = Critic(model=broken(tmp_path / "model", dir32), optimizer=AdamW(lr=1e-3))
    run = ppo_run(model32, critic=critic, total_steps=9, safety=skipping(), **QUICK, **SHARDINGS[sharding])
    with pytest.raises(NonFiniteError, match=r"(?s)Step 1: not finite: values .*\n  The batch: .*step_1_score"):
        fit(run, tmp_path / "run")


def test_an_actor_that_cannot_be_drawn_from_ends_the_run_in_words(dir32, tmp_path):
    run = ppo_run(broken(tmp_path / "model", dir32), GRPO_ALGORITHM, critic=None, safety=skipping(), **QUICK)
    with pytest.raises(ValueError, match="the logits were NaN"):
        fit(run, tmp_path / "run")


@pytest.mark.parametrize("sharding", ["none", *exhaustive("ddp")])
def test_an_update_whose_gradient_overflows_is_left_out_by_every_process(model32, tmp_path, sharding):

    def course(directory: Path, overflow: bool) -> dict:
        run = ppo_run(model32, GRPO_ALGORITHM, critic=None, safety=skipping(), **QUICK, **SHARDINGS[sharding])
        with run.build(BuildContext(run_dir=directory)) as trainer:
            trainer.tracker.start("run", {}, directory, 2)
            rows = trainer.score(
                trainer.sampling.generate(trainer.train_data.collate([0, 1, 2]), GenerationRequest(1, 2))
            )
            experience, _ = trainer.advantages(rows)
            huge = experience["advantages"].clone()
            huge[0] = 1e38 * experience["response_mask"][0]  # one row: under ddp one process alone has it
            other = experience.select([name for name in experience.batch if name != "advantages"])
            large = other.union(DataProto.from_dict({"advantages": huge}))
            trainer.update(experience, 1)
            if overflow:
                metrics = trainer.update(large, 2)
                assert math.isfinite(metrics["actor/loss"])  # of the mini-batches that were sound
                assert trainer.guards.monitor.take() == {"safety/skipped_updates": 1.0}
            else:
                whole = [part for part in trainer.mini_batches(large, 2) if 0 not in part.tolist()]
                for part in whole:
                    trainer.actor.update(large[part]).result()
            trainer.update(experience, 3)
            trainer.save(directory / "saved")
        return weights(directory / "saved")

    left_out, never = course(tmp_path / "overflow", overflow=True), course(tmp_path / "never", overflow=False)
    assert all(torch.equal(x, never[name]) for name, x in left_out.items())
    batch = DataProto.load(tmp_path / "overflow" / "anomalies" / "step_0_actor" / "batch.safetensors")
    assert len(batch) == 2
    assert batch["advantages"].max() > 1e37


def test_an_update_that_is_left_out_leaves_the_optimizer_and_its_schedule_as_they_were(model32, tmp_path):
    run = ppo_run(model32, PPO_ALGORITHM, safety=skipping(plant_nan_at=2), total_steps=9, **QUICK)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        trainer.tracker.start("run", {}, tmp_path, 9)
        batch = trainer.train_data.collate([0, 1, 2])
        trainer.step(batch, 1)
        engines = [trainer.cluster.worker(role).engine for role in ("actor", "critic")]

        def tensors(engine: Any) -> list[Any]:
            return copy.deepcopy(tree_leaves([engine.optimizer.state_dict(), engine.model.state_dict()]))

        before = [tensors(engine) for engine in engines]
        metrics = trainer.step(batch, 2)
        for engine, expected in zip(engines, before, strict=True):
            assert engine.updates == 2
            torch.testing.assert_close(tensors(engine), expected, rtol=0, atol=0)
        assert math.isnan(metrics["actor/loss"])
        assert math.isnan(metrics["critic/loss"])
        assert trainer.guards.monitor.take() == {"safety/skipped_updates": 4.0}
        trainer.step(batch, 3)
        assert [engine.updates for engine in engines] == [4, 4]


@pytest.mark.parametrize("sharding", ["none", *exhaustive("ddp")])
def test_a_loss_that_is_not_finite_stops_the_run_with_its_mini_batch(model32, tmp_path, sharding):
    run = ppo_run(
        model32,
        GRPO_ALGORITHM,
        critic=None,
        safety=Monitoring(plant_nan_at=2),
        total_steps=3,
        **QUICK,
        **SHARDINGS[sharding],
    )
    with pytest.raises(NonFiniteError, match=r"(?s)Step 2: actor/loss is nan, .*\n  The batch: .*step_2_actor"):
        fit(run, tmp_path)
    batch = DataProto.load(tmp_path / "anomalies" / "step_2_actor" / "batch.safetensors")
    assert len(batch) == 2  # one of three mini-batches
    assert all(name in batch for name in ("prompt_text", "response_text", "score", "advantages", "old_log_probs"))


def test_fine_tuning_skips_and_stops_likewise(dir32, tmp_path):
    def run(safety: Monitoring):
        made = sft_run(dir32, tmp_path)
        return dataclasses.replace(
            made, trainer=dataclasses.replace(made.trainer, safety=safety, total_steps=4), tracker=JSONL
        )

    result = fit(run(skipping(plant_nan_at=2)), tmp_path / "skip")
    assert result.status == "finished"
    lines = [line for line in steps_of(tmp_path / "skip") if "sft/loss" in line]
    assert [line.get("safety/skipped_updates") for line in lines] == [None, 1, None, None]
    assert lines[1]["sft/loss"] == "nan"
    with pytest.raises(NonFiniteError, match=r"(?s)Step 2: sft/loss is nan.*step_2_sft"):
        fit(run(Monitoring(plant_nan_at=2)), tmp_path / "stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(PPO_ALGORITHM, id="ppo", marks=pytest.mark.exhaustive), pytest.param(GRPO_ALGORITHM, id="grpo")],
)
def test_a_sound_run_has_the_same_numbers_bit_for_bit_whatever_the_settings(model32, tmp_path, algorithm):
    def course(name: str, safety: Monitoring) -> tuple[list[dict], dict]:
        options = {**QUICK, "save_final": True}
        fit(ppo_run(model32, algorithm, total_steps=5, safety=safety, **options), tmp_path / name)
        return [without_times(line) for line in steps_of(tmp_path / name)], weights(tmp_path / name / "actor")

    off = course("off", Monitoring(log_prob_gap=None, max_dumps=0))
    on = course("on", skipping())
    assert [{k: v for k, v in line.items() if not k.startswith("safety/")} for line in on[0]] == off[0]
    assert all(torch.equal(x, off[1][name]) for name, x in on[1].items())


def test_a_batch_that_cannot_be_written_stops_nothing(model32, tmp_path, caplog):
    tmp_path.joinpath("anomalies").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="verl"):
        result = fit(ppo_run(model32, total_steps=2, safety=skipping(plant_nan_at=1), **QUICK), tmp_path)
    assert result.status == "finished"
    assert "could not be written" in caplog.text
