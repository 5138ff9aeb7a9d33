"""What an algorithm may ask of the loop: a greedy baseline, groups of mixed rewards, weights, a moving coefficient."""

import dataclasses
import inspect

import pytest
import torch
from cases import each_value_once
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, JSONL, PPO_ALGORITHM, Arbitrary, Prompts, fit, ppo_run, read_lines, step_lines

from verl.algorithms.critic_free_advantages import ReMax
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import AdaptiveKLInReward
from verl.component import BuildContext, component
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.trainer.guards import STAGES
from verl.trainer.ppo import PPOTrainer
from verl.trainer.sampling import Sampling

REMAX = dataclasses.replace(PPO_ALGORITHM, advantage=ReMax(), epochs=1)
TEXTS = ("a", "9-", "1+2=", "12+", "34+5=", "77+1=")  # of 1, 2, 4, 3, 5 and 5 characters


@component
class MixedFor(RewardDescription, Reward):
    """Arbitrary scores for prompts of the lengths given, 1 for all others."""

    lengths: tuple[int, ...]

    def score(self, prompts: list[str], responses: list[str], *, length: list[int], **columns: list) -> list[float]:
        scores = Arbitrary().score(prompts, responses)
        return [score if n in self.lengths else 1.0 for score, n in zip(scores, length, strict=True)]


def selecting(model, selection: DynamicSampling, lengths: tuple[int, ...], **settings):
    algorithm = dataclasses.replace(GRPO_ALGORITHM, selection=selection, mini_batches=2)
    data = Prompts(train=TEXTS)
    options = {"prompts_per_step": 2, "group_size": 4} | settings
    return ppo_run(model, algorithm, reward=MixedFor(lengths=lengths), data=data, **options)


def test_each_response_meets_the_greedy_one_to_its_own_prompt(model32, tmp_path):
    with ppo_run(model32, REMAX, group_size=3).build(BuildContext(run_dir=tmp_path)) as trainer:
        prompts = trainer.train_data.collate([4, 0, 2])
        rows = trainer.sampling.generate(prompts, GenerationRequest(1, 3))
        greedy = trainer.sampling.generate(prompts, GenerationRequest(1, 1, greedy=True))
        expected = trainer.reward.score_tokens(greedy)["score"].astype(float).repeat(3)
        assert rows["greedy_scores"].tolist() == expected.tolist()
        assert len(set(expected)) == 3
        metrics = trainer.step(prompts, 2)
        assert trainer.critic is None
    assert all(value == value for value in metrics.values())


def test_groups_of_equal_rewards_are_replaced_by_groups_of_further_prompts(model32, tmp_path):
    run = selecting(model32, DynamicSampling(max_rounds=3), lengths=(5, 4))
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        seen = []
        update, trainer.update = trainer.update, lambda rows, step: seen.append(rows) or update(rows, step)
        first = trainer.train_data.collate([0, 1])  # neither is mixed
        trainer.sampler.next_batch = iter([torch.tensor([0, 3]), torch.tensor([2, 4])]).__next__
        metrics = trainer.step(first, 1)
    (rows,) = seen
    assert sorted(set(rows["prompt_ids"].tolist())) == [2, 4]
    assert torch.equal(rows["group_ids"], torch.arange(2).repeat_interleave(4))
    assert [metrics[f"selection/{name}"] for name in ("rounds", "groups", "kept_share")] == [3, 5, 2 / 5]
    assert metrics["perf/samples"] == 8


def test_a_batch_that_is_not_filled_trains_on_what_there_is(model32, tmp_path):
    run = selecting(model32, DynamicSampling(max_rounds=1), lengths=(4,))
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        metrics = trainer.step(trainer.train_data.collate([0, 2]), 1)
        assert (trainer.actor.sync().result() is not None, metrics["perf/samples"]) == (True, 4)


def test_without_a_mixed_group_a_run_skips_its_steps_or_ends_in_words(model32, tmp_path):
    options = {"lengths": (), "total_steps": 2, "save_final": False, "tracker": JSONL}
    skipping = selecting(model32, DynamicSampling(max_rounds=9, on_none="skip"), **options)
    with skipping.build(BuildContext(run_dir=tmp_path / "skipping")) as trainer:
        result = trainer.fit()
    steps = [line for line in read_lines(tmp_path / "skipping/metrics.jsonl") if "selection/skipped" in line]
    assert [line["selection/skipped"] for line in steps] == [1, 1]
    assert all("actor/loss" not in line for line in steps)
    assert (result.status, result.steps, result.samples) == ("finished", 2, 0)

    ending = selecting(model32, DynamicSampling(max_rounds=2), lengths=())
    with (
        ending.build(BuildContext(run_dir=tmp_path / "ending")) as trainer,
        refusal("4 prompts in 2 rounds", "rewards from 1 to 1", kind=RewardError),
    ):
        trainer.step(trainer.train_data.collate(trainer.sampler.next_batch()), 1)


def test_an_engine_that_agrees_with_the_trainer_needs_no_correction(model64, tmp_path):
    def credit(correction):
        algorithm = dataclasses.replace(GRPO_ALGORITHM, correction=correction)
        with ppo_run(model64, algorithm, group_size=3).build(BuildContext(run_dir=tmp_path)) as trainer:
            scored = trainer.score(
                trainer.sampling.generate(trainer.train_data.collate([0, 1]), GenerationRequest(1, 3))
            )
            off = scored.select([name for name in scored.batch if name != "rollout_log_probs"]).union(
                DataProto.from_dict({"rollout_log_probs": scored["old_log_probs"] - torch.log(torch.tensor(1.5))})
            )
            return trainer.advantages(scored), trainer.advantages(off)

    (plain, _), _ = credit(None)
    (same, metrics), (weighted, _) = credit(TruncatedIS(cap=2.0))
    assert torch.allclose(same["advantages"], plain["advantages"], rtol=1e-9, atol=0)
    assert metrics["importance/weight_mean"] == pytest.approx(1)
    assert torch.allclose(weighted["advantages"], 1.5 * plain["advantages"], rtol=1e-6, atol=0)


def test_the_coefficient_of_an_adaptive_kl_moves_from_step_to_step(model32, tmp_path):
    algorithm = dataclasses.replace(PPO_ALGORITHM, kl=AdaptiveKLInReward(coef=0.1, target=1e-3, horizon=10.0))
    with ppo_run(model32, algorithm, lr=1e-2).build(BuildContext(run_dir=tmp_path)) as trainer:
        coefs = [trainer.step(trainer.train_data.collate([0, 1, 2]), step)["kl/coef"] for step in (1, 2, 3)]
        assert trainer.kl.state_dict()["coef"] not in coefs
    assert coefs[0] == 0.1
    assert len(set(coefs)) == 3


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(("mini_batches", "coefs"), each_value_once([1, 2], [(0.0, 0.1), (0.01, 0.0)]))
def test_every_update_of_a_run_with_an_entropy_bonus_has_its_entropy(mini_batches, coefs, model32, tmp_path):
    bonus = dict(zip(("entropy_coef", "final_entropy_coef"), coefs, strict=True))
    algorithm = dataclasses.replace(GRPO_ALGORITHM, mini_batches=mini_batches, **bonus)
    tracker = JSONL
    fit(ppo_run(model32, algorithm, tracker=tracker, total_steps=2), tmp_path)
    lines = step_lines(tmp_path)
    assert ["actor/entropy" in line for line in lines] == [True, True]


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("algorithm", [PPO_ALGORITHM, GRPO_ALGORITHM], ids=["ppo", "grpo"])
@pytest.mark.parametrize("share", [1, 2], ids=["every response", "about every second one"])
def test_the_reward_of_an_empty_answer_lies_on_its_end(algorithm, share, model32, tmp_path):
    vocabulary = len(model32.load_tokenizer())
    rollout = HFRollout(max_new_tokens=7, stop_token_ids=tuple(range(0, vocabulary, share)))
    with ppo_run(model32, algorithm, rollout=rollout).build(BuildContext(run_dir=tmp_path)) as trainer:
        batch = trainer.train_data.collate(range(3))
        rows = trainer.score(trainer.sampling.generate(batch, GenerationRequest(1, 2)))
        mask, lengths = rows["response_mask"], rows["response_mask"].sum(dim=1)
        assert (lengths == 1).any()
        assert (lengths == 1).all() or share > 1
        last = torch.nn.functional.one_hot(lengths - 1, mask.shape[1]).bool()
        scores = torch.tensor(rows["score"].astype(float), dtype=rows["token_level_scores"].dtype)
        assert torch.equal(rows["token_level_scores"][last], scores)
        assert not rows["token_level_scores"][~last].any()
        experience, _ = trainer.advantages(rows)
        assert not experience["advantages"][~mask].any()
        metrics = trainer.step(batch, 1)
        assert metrics["actor/grad_norm"] >= 0
        assert metrics["rollout/response_length_tokens"] >= 1


def test_every_stage_is_a_method_and_the_step_names_no_guard():
    assert all(hasattr(PPOTrainer, name) or hasattr(Sampling, name) for name in STAGES)
    source = inspect.getsource(PPOTrainer.step).lower()
    assert not any(word in source for word in ("guard", "monitor", "plant", "queue", "inspect"))
