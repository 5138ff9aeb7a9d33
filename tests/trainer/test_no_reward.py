"""Rewards of None: such responses enter no baseline and no loss, whatever the estimator, and are counted."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from trainer.runs import JSONL, PPO_ALGORITHM, Arbitrary, Prompts, fit, ppo_run, read_lines, step_lines, weights
from trainer.test_async_episodes import playing

from verl.algorithms.advantages import GAE, GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.critic_free_advantages import OPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.losses import PPOClip
from verl.cli.report.page import pass_rates
from verl.component import BuildContext, component
from verl.rewards.base import Reward, RewardDescription
from verl.rewards.normalization import RewardNormalization
from verl.rewards.weighted_sum import WeightedSum

ESTIMATORS = (GAE(), GRPO(), RLOO(), OPO(), ReinforcePlusPlus(), ReinforcePlusPlusBaseline(), ReMax())
SIZES = {"prompts_per_step": 3, "group_size": 4, "eval_before": False, "save_final": False, "tracker": JSONL}


@component
class Sometimes(RewardDescription, Reward):
    """`Arbitrary`, and None for every `every`-th text by its sum of characters."""

    every: int = 2

    def score(self, prompts, responses, **columns):
        scores = Arbitrary().score(prompts, responses)
        return [None if sum(map(ord, y)) % self.every == 0 else x for x, y in zip(scores, responses, strict=True)]


def algorithm(estimator, **options):
    return Algorithm(advantage=estimator, policy_loss=PPOClip(), **options)


def trained(tmp_path, run):
    """The lines of the metrics, and what reached the update in each step."""
    seen = []
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        update = trainer.update
        trainer.update = lambda experience, step: (seen.append(experience), update(experience, step))[1]
        trainer.fit()
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "perf/samples" in line]
    return lines, seen


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda x: type(x).__name__)
def test_a_response_without_a_reward_enters_no_baseline_and_no_loss(estimator, model32, tmp_path):
    run = ppo_run(model32, algorithm(estimator), reward=Sometimes(), total_steps=2, **SIZES)
    lines, seen = trained(tmp_path, run)
    assert 0 < sum(line["reward/unscored"] for line in lines) < 24
    for line, rows in zip(lines, seen, strict=True):
        assert line["perf/samples"] == len(rows) == 12 - line["reward/unscored"]
        assert all(math.isfinite(x) for x in line.values() if isinstance(x, float))
        assert None not in rows["score"]
        if isinstance(estimator, GRPO):
            scores, groups, mask = (torch.tensor(rows["score"].astype(float)), rows["group_ids"], rows["response_mask"])
            for row, group in enumerate(groups.tolist()):
                own = scores[groups == group]
                spread = float(own.std()) if len(own) > 1 else 0.0
                expected = float(scores[row] - own.mean()) / (spread + 1e-6)
                assert float(rows["advantages"][row][mask[row]][0]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("estimator", [GAE(), GRPO(), ReMax()], ids=lambda x: type(x).__name__)
def test_a_step_in_which_no_response_has_a_reward_says_so_and_updates_nothing(
    estimator, model32, tmp_path, monkeypatch
):
    run = ppo_run(model32, algorithm(estimator), reward=Sometimes(every=1), total_steps=2, **SIZES)
    described = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, save_final=True))
    messages = []
    with described.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        monkeypatch.setattr(trainer.tracker, "message", messages.append)
        trainer.fit()
    assert sum("12 responses" in message for message in messages) == 2
    assert not step_lines(tmp_path / "run")
    lines = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "reward/unscored" in line]
    assert [(line["perf/samples"], line["reward/unscored"]) for line in lines] == [(0.0, 12.0)] * 2
    mine, before = weights(tmp_path / "run/actor"), weights(Path(model32.path))
    assert mine
    assert all(x.equal(before[name]) for name, x in mine.items())


def test_an_evaluation_counts_responses_without_a_reward_and_leaves_them_out(model32, tmp_path):
    data = Prompts(eval=tuple(f"{i}+{i}=" for i in range(8)))
    run = ppo_run(model32, algorithm(GRPO()), reward=Sometimes(), total_steps=1, data=data, **SIZES)
    evaluated = list(fit(run, tmp_path).evaluations.values())[-1]
    assert 0 < evaluated["eval/unscored"] < 8
    rows = read_lines(tmp_path / "evals/step_1.jsonl")
    assert len(pass_rates(rows, "greedy")) == 8 - evaluated["eval/unscored"]
    assert all(math.isfinite(x) for x in evaluated.values())


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("staleness", [1, 2])
def test_asynchronous_training_leaves_them_out_too(every, staleness, model32, tmp_path):
    described = algorithm(GRPO(), proximal="behaviour")
    sizes = SIZES | {"mode": "async", "max_staleness": staleness}
    run = ppo_run(model32, described, reward=Sometimes(every=every), total_steps=3, **sizes)
    lines, seen = trained(tmp_path, run)
    assert [line["perf/samples"] + line.get("reward/unscored", 0) for line in lines] == [12.0] * 3
    assert len(seen) == (0 if every == 1 else 3)


def test_dynamic_sampling_selects_among_the_rated(model32, tmp_path):
    for every in (2, 1):
        selection = DynamicSampling(max_rounds=2)
        run = ppo_run(
            model32, algorithm(GRPO(), selection=selection), reward=Sometimes(every=every), total_steps=2, **SIZES
        )
        lines, seen = trained(tmp_path / str(every), run)
        assert all(line["reward/unscored"] > 0 for line in lines)
        assert all(None not in rows["score"] for rows in seen)
        assert all(math.isfinite(x) for line in lines for x in line.values() if isinstance(x, float))


def test_a_sum_counts_only_the_parts_that_have_a_reward_and_normalisation_reads_the_rated(model32, tmp_path):
    both = WeightedSum(parts={"a": Sometimes(), "b": Sometimes(every=3)}, weights={"a": 1.0, "b": 2.0})
    run = ppo_run(model32, algorithm(GRPO()), reward=RewardNormalization(reward=both), total_steps=2, **SIZES)
    lines, seen = trained(tmp_path, run)
    for line, rows in zip(lines, seen, strict=True):
        assert line["perf/samples"] == len(rows) == 12 - line.get("reward/unscored", 0)
        assert math.isfinite(line["reward/mean"])
        assert math.isfinite(line["reward/a"])
    raw = [x for rows in seen for x in rows["reward/raw"]]
    parts = [(x, y) for rows in seen for x, y in zip(rows["reward/a"], rows["reward/b"], strict=True)]
    for total, (a, b) in zip(raw, parts, strict=True):
        assert total == pytest.approx(sum(weight * x for weight, x in ((1, a), (2, b)) if not math.isnan(x)))


def test_a_step_with_fewer_responses_than_mini_batches_is_trained_on(model32, tmp_path):
    many = dataclasses.replace(PPO_ALGORITHM, mini_batches=12)
    run = ppo_run(model32, many, reward=Sometimes(), total_steps=1, **SIZES)
    lines, seen = trained(tmp_path, run)
    assert len(seen) == len(lines) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_episodes_without_a_reward_are_left_out(mode, model32, tmp_path):
    for every in (1, 2):
        run = dataclasses.replace(playing(model32, tmp_path, mode=mode), reward=Sometimes(every=every))
        lines, seen = trained(tmp_path / str(every), run)
        assert [line["perf/samples"] + line["reward/unscored"] for line in lines] == [6.0] * 4
        assert len(seen) == sum(line["perf/samples"] > 0 for line in lines)
        assert all(math.isfinite(x) for line in lines for x in line.values() if isinstance(x, float))
