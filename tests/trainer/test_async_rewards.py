"""Groups that are finished are rated while the trainer works, and nothing of it is seen in the numbers."""

import contextlib
import dataclasses
import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from environments.waiting_game import WaitingGames
from same_training import course, numbers, same_training, saved
from storage.s3_server import wait_until
from trainer.runs import GRPO_ALGORITHM, Prompts, fit, step_lines

from verl.algorithms.importance_sampling import TruncatedIS
from verl.checkpoint.resolve import resolve
from verl.component import BuildContext, component
from verl.data.sampler import DataSampler
from verl.protocol import DataProto
from verl.rewards.async_rewards import AsyncRewards
from verl.rewards.base import Reward, RewardDescription, RewardResult, texts_of, token_scores_of
from verl.rewards.normalization import RewardNormalization
from verl.rewards.weighted_sum import WeightedSum
from verl.rollout.hf import HFRollout
from verl.trainer.ppo import PPOTrainer
from verl.trainer.state.compare_runs import Tolerance, first_part_apart
from verl.trainer.train_loop import TrainLoop
from verl.utils.seeding import derive_seed

CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)
CALLS: list[tuple[str, list[str]]] = []  # thread and prompts of each call in training


@component
class Counted(RewardDescription):
    """A reward that counts its calls, and fails on the first of these prompts."""

    fails_on: tuple[str, ...] = ()
    of_tokens: bool = False

    def build(self, context: BuildContext) -> Reward:
        return CountedReward(self)


class CountedReward(Reward):
    """The reward that `Counted` builds."""

    call_timeout_s = None
    scores_ahead = scores_groups = True

    def __init__(self, described: Counted):
        self.described, self.is_frozen = described, False

    def score_batch(self, batch: DataProto) -> RewardResult:
        prompts, responses, _ = texts_of(batch)
        if not self.is_frozen:
            CALLS.append((threading.current_thread().name, prompts))
        if set(prompts) & set(self.described.fails_on):
            raise ValueError(f"planted {prompts.index(self.described.fails_on[0])}")
        scores = np.array([sum(map(ord, text)) % 17 / 16 for text in responses])
        texts = np.array([text[::-1] for text in responses], dtype=object)
        tokens = token_scores_of(RewardResult(scores), batch["response_mask"]) if self.described.of_tokens else None
        return RewardResult(scores, {"half": scores / 2}, {"text": texts}, tokens, {"counted": [float(len(prompts))]})

    @contextlib.contextmanager
    def frozen(self) -> Any:
        self.is_frozen = True
        yield
        self.is_frozen = False


def ahead(model: Any, directory: Any, reward: RewardDescription, **options: Any) -> Any:
    settings = {"mode": "async", "max_staleness": 2, "prompts_per_step": 2, "eval_interval": 2, **options}
    return course(model, directory, CORRECTED, reward=reward, **settings)


def engine_of(weight_update: Any) -> HFRollout:
    """Responses of some length, so that some are there while the trainer works."""
    return HFRollout(max_new_tokens=7, weight_update=weight_update, kv_cache="recompute")


# two parts of a sum, one with statistics, and statistics of the sum
PARTS = {"plain": Counted(), "scaled": RewardNormalization(reward=Counted())}
SUM = RewardNormalization(reward=WeightedSum(parts=PARTS, weights={"plain": 0.5, "scaled": 2.0}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "weight_update", "scores_groups"),
    [
        pytest.param(Counted(), "drain", False, marks=pytest.mark.exhaustive),
        (SUM, "drain", True),
        (SUM, "in_flight", True),
        pytest.param(SUM, "in_flight", False, marks=pytest.mark.exhaustive),
    ],
)
def test_metrics_statistics_and_checkpoints_are_those_of_a_run_that_rates_in_turn(
    reward, weight_update, scores_groups, model32, tmp_path, monkeypatch
):
    monkeypatch.setattr(CountedReward, "scores_groups", scores_groups)
    threads: dict[bool, set[str]] = {}
    options: dict[str, Any] = {"rollout": engine_of(weight_update)}
    for scores_ahead in (False, True):
        CALLS.clear()
        monkeypatch.setattr(CountedReward, "scores_ahead", scores_ahead)
        fit(ahead(model32, tmp_path / str(scores_ahead), reward, **options), tmp_path / str(scores_ahead) / "run")
        if weight_update == "in_flight":
            options["replay_schedule"] = str(tmp_path / "False/run")
        threads[scores_ahead] = {thread for thread, _ in CALLS}
    assert threads[False] == {"MainThread"}
    assert "async rewards" in threads[True]
    same_training(saved(tmp_path / "True"), saved(tmp_path / "False"))
    counted = [line[key] for line in step_lines(tmp_path / "True/run") for key in line if key.endswith("counted")]
    assert set(counted) == {4.0}  # rows of a step, each step


@pytest.mark.slow
@pytest.mark.parametrize("weight_update", ["drain", pytest.param("in_flight", marks=pytest.mark.exhaustive)])
def test_a_resumed_run_rates_no_group_again_that_was_rated_before_the_save_and_goes_on_the_same(
    weight_update, model32, tmp_path, monkeypatch
):
    update = PPOTrainer.update

    def rated_before_the_save(self, experience, step):
        until = time.monotonic() + 30
        while step == 2 and not self.async_rewards.state_dict() and time.monotonic() < until:
            time.sleep(0.01)
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", rated_before_the_save)
    options: dict[str, Any] = {"rollout": engine_of(weight_update)}
    fit(ahead(model32, tmp_path / "whole", SUM, **options), tmp_path / "whole/run")
    if weight_update == "in_flight":
        options["replay_schedule"] = str(tmp_path / "whole/run")
    resume = tmp_path / "whole/checkpoints/global_step_2"
    saved_groups = {
        (result["step"], group)
        for result in json.loads((resume / "scheduler/state.json").read_text())["async_rewards"]["ratings"]
        for group, _ in result["digests"]
    }
    assert saved_groups
    CALLS.clear()
    fit(ahead(model32, tmp_path, SUM, resume=resume, **options), tmp_path / "run")
    assert sum(len(prompts) for _, prompts in CALLS) == 2 * 2 * (4 - len(saved_groups))  # parts, rows, groups to come
    same_training(saved(tmp_path), saved(tmp_path / "whole"), after=2)
    points = [resolve(str(path / "checkpoints/global_step_3"), path) for path in (tmp_path, tmp_path / "whole")]
    first, second = (point.checkpoint for point in points if point is not None)
    assert first_part_apart(first, second, Tolerance()) is None  # whatever was rated before these saves


class WaitingReward(CountedReward):
    """Says which prompts it has rated by files, which `WaitingGames` wait for."""

    def score_batch(self, batch: DataProto) -> RewardResult:
        result = super().score_batch(batch)
        for length in batch.non_tensor_batch["length"]:
            Path(self.described.fails_on[0], f"rated_{length}").touch()
        return result


@component
class Waiting(Counted):
    """`fails_on` is the directory of the files."""

    def build(self, context: BuildContext) -> Reward:
        return WaitingReward(self)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])  # awaited at once; begun ahead
def test_a_group_is_rated_while_another_of_its_batch_is_generated(step, model32, tmp_path):
    order = DataSampler(8, 2, seed=derive_seed(0, "data order"))
    slow, awaited = [[1 + row for row in order.next_batch().tolist()] for _ in range(4)][step - 1]
    games = WaitingGames(slow=slow, awaited=awaited, directory=str(tmp_path), max_tokens=20, max_turns=2)
    data = Prompts(train=tuple("1" * length for length in range(1, 9)), eval=())
    options: dict[str, Any] = {"rollout": engine_of("in_flight"), "data": data, "eval_samples": 0}
    run = ahead(model32, tmp_path, Waiting(fails_on=(str(tmp_path),)), **options)
    fit(dataclasses.replace(run, environment=games), tmp_path / "run")
    assert [path.name for path in tmp_path.glob("waited_*")] == ["waited_for_it"]
    assert len(step_lines(tmp_path / "run")) == 4


def batch_of_groups(chance: random.Random) -> DataProto:
    """Responses of two to five tokens to each of some prompts, three side by side."""
    groups = chance.randint(1, 5)
    lengths = torch.tensor([chance.randint(2, 5) for _ in range(3 * groups)])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.tensor([[chance.randint(65, 90) for _ in range(mask.shape[1])] for _ in lengths])
    numbers = torch.arange(groups).repeat_interleave(3)
    texts = ["".join(map(chr, row[kept].tolist())) for row, kept in zip(tokens, mask, strict=True)]
    return DataProto.from_dict(
        {"responses": tokens * mask, "response_mask": mask, "prompt_ids": 7 + numbers, "group_ids": numbers},
        {"prompt_text": [f"p{group}" for group in numbers.tolist()], "response_text": texts},
    )


def fed(reward: Reward, stats: Any) -> AsyncRewards:
    rewards = AsyncRewards()
    rewards.is_fed = True
    rewards.use(reward, stats)
    return rewards


TOKENS = WeightedSum(
    parts={"plain": Counted(), "tokens": Counted(of_tokens=True)}, weights={"plain": 1.0, "tokens": 0.3}
)


@pytest.mark.parametrize("reward", [SUM, TOKENS])
def test_groups_in_any_order_with_saves_between_are_rated_as_a_batch_at_once(reward):
    for seed in range(40):
        chance, at_once, in_parts = random.Random(seed), reward.build(BuildContext()), reward.build(BuildContext())
        stats: Any = SimpleNamespace(identity={"reward": 1})
        rewards = fed(in_parts, stats)
        for step in (1, 2):
            batch = batch_of_groups(chance)
            prompts = DataProto.from_dict({"prompt_ids": batch["prompt_ids"][::3]})
            rewards.expect(step, prompts, lambda rows: rows)
            groups = list(range(len(prompts)))
            chance.shuffle(groups)
            late = chance.randint(0, len(groups))
            while len(groups) > late:
                chosen, groups = groups[: (n := chance.randint(1, len(groups) - late))], groups[n:]
                rows = [row for group in sorted(chosen) for row in range(3 * group, 3 * group + 3)]
                width = int(batch["response_mask"][rows].sum(dim=1).max())
                fields = {name: x[rows] for name, x in batch.batch.items()}
                fields |= {name: fields[name][:, :width] for name in ("responses", "response_mask")}
                texts = {name: x[rows] for name, x in batch.non_tensor_batch.items()}
                rewards.note({step: DataProto.from_dict(fields, texts)})
                if chance.random() < 0.3:
                    until = time.monotonic() + 10
                    while chance.random() < 0.9 and not rewards.state_dict() and time.monotonic() < until:
                        time.sleep(0.001)
                    state = json.loads(json.dumps(rewards.state_dict()))
                    rewards.close()
                    rewards = fed(in_parts, stats)
                    rewards.load_state_dict(state)
                    rewards.expect(step, prompts, lambda rows: rows)
            result = rewards.result_of(step, batch)
            counted = rewards.take_counts()
            assert sum(counted.values()) == 2 * len(batch)
            scored = in_parts.score_tokens(batch, in_parts.apply(result, batch))
            expected = at_once.score_tokens(batch)
            assert scored["token_level_scores"].equal(expected["token_level_scores"])
            assert scored.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
            for name, column in expected.non_tensor_batch.items():
                assert list(scored[name]) == list(column), (seed, name)
        assert in_parts.state_dict() == at_once.state_dict()
        rewards.close()


def test_a_group_that_fails_beside_rated_ones_is_told_by_its_row_of_the_batch():
    chance = random.Random(4)
    while len(batch := batch_of_groups(chance)) < 9:
        pass
    rewards = fed(Counted(fails_on=("p1",)).build(BuildContext()), SimpleNamespace(identity={}))
    rewards.expect(1, DataProto.from_dict({"prompt_ids": batch["prompt_ids"][::3]}), lambda rows: rows)
    rewards.note({1: batch[[0, 1, 2]]})
    while not rewards.state_dict():
        time.sleep(0.001)
    rewards.note({1: batch[[3, 4, 5]]})
    with pytest.raises(ValueError, match="planted 3"):
        rewards.result_of(1, batch)
    rewards.close()


def test_ratings_of_other_responses_or_of_another_reward_are_not_used():
    batch = batch_of_groups(random.Random(1))
    prompts = DataProto.from_dict({"prompt_ids": batch["prompt_ids"][::3]})
    stats: Any = SimpleNamespace(identity={"reward": 1})
    rewards = fed(Counted().build(BuildContext()), stats)
    rewards.expect(1, prompts, lambda rows: rows)
    rewards.note({1: batch})
    while not (state := rewards.state_dict()):
        time.sleep(0.001)
    others = batch.batch["responses"].clone()
    others[0, 0] += 1
    changed = DataProto.from_dict(dict(batch.batch) | {"responses": others}, dict(batch.non_tensor_batch))
    for identity, rollout, is_used in ({"reward": 1}, batch, True), ({"reward": 1}, changed, False), ({}, batch, False):
        stats.identity = identity
        rewards.load_state_dict(state)
        CALLS.clear()
        rewards.result_of(1, rollout)
        assert bool(CALLS) == (not is_used)
    rewards.close()


@pytest.mark.slow
def test_a_reward_that_fails_ahead_ends_the_run_at_its_step_with_the_same_words(model32, tmp_path, monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(CountedReward, "scores_ahead", False)
    fit(ahead(model32, tmp_path / "sound", Counted()), tmp_path / "sound/run")
    errors, prompts = [], tuple(CALLS[2][1][2:3])  # the second group of step 3
    for scores_ahead in (False, True):
        directory = tmp_path / str(scores_ahead)
        monkeypatch.setattr(CountedReward, "scores_ahead", scores_ahead)
        reward = Counted(fails_on=prompts)
        with pytest.raises(ValueError, match="planted") as error:
            fit(ahead(model32, directory, reward), directory / "run")
        errors.append(str(error.value))
        assert list(numbers(directory / "run")) == [1, 2]
    assert errors[0] == errors[1]


def test_a_reward_that_is_replaced_rates_what_was_begun_before_anew(model32, tmp_path):
    with ahead(model32, tmp_path, Counted()).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        loop = TrainLoop(trainer, {})
        loop.open()
        loop.step()
        trainer.sampling.queue.collect()
        trainer.replace_reward(SUM)
        loop.step()
    last = step_lines(tmp_path / "run")[-1]
    assert {"reward/plain", "reward/scaled", "reward/raw"} <= last.keys()


class SlowReward(Reward):
    """A reward whose first rating lasts until `goes_on`."""

    scores_ahead = scores_groups = True

    def __init__(self) -> None:
        self.is_begun, self.goes_on, self.num_calls = threading.Event(), threading.Event(), 0

    def prepare(self, batch: DataProto) -> RewardResult:
        self.is_begun.set()
        assert self.goes_on.wait(60)
        self.num_calls += 1
        return RewardResult(np.arange(len(batch), dtype=np.float64))


def test_a_rating_that_ends_after_a_checkpoint_was_loaded_is_not_counted_beside_the_one_after_it():
    rewards, reward = AsyncRewards(), SlowReward()
    rewards.is_fed = True
    rewards.use(reward, SimpleNamespace(identity={}))
    ids, tokens = torch.tensor([0, 0, 1, 1]), torch.arange(8).view(4, 2)
    fields = {"group_ids": ids, "prompt_ids": ids, "responses": tokens, "response_mask": tokens >= 0}
    prompts, rows = DataProto.from_dict({"prompt_ids": torch.tensor([0, 1])}), DataProto.from_dict(fields)
    rewards.expect(1, prompts, lambda rows: rows)
    rewards.note({1: rows})
    assert reward.is_begun.wait(60)
    rewards.load_state_dict({})  # as after the loss of a worker
    rewards.expect(1, prompts, lambda rows: rows)
    reward.goes_on.set()
    rewards.note({1: rows})
    wait_until(lambda: reward.num_calls == 2, 60)
    assert len(rewards.result_of(1, rows).scores) == len(rows)
    rewards.close()
