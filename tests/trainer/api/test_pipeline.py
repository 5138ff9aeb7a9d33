"""A run declared by its parts is the run that the same parts make step by step."""

from __future__ import annotations

import pytest
import torch
from random_models import save_random_classifier
from refusals import refused

from verl.models.pretrained import Pretrained
from verl.rewards.rules import ExactMatch
from verl.rewards.weighted_sum import WeightedSum
from verl.trainer.api.from_objects import summed_rewards
from verl.trainer.api.pipeline import DataPipeline, RLTrainer
from verl.trainer.api.trainer import Trainer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
TRAINING = {
    "lr": 3e-3,
    "prompts_per_step": 3,
    "total_steps": 2,
    "eval_samples": 0,
    "num_threads": 1,
    "save_final": False,
}
ROLLOUT = {"max_new_tokens": 5, "n": 2}


def digits(prompts, responses, answer):
    return [sum(c.isdigit() for c in text) / 5 for text in responses]


def declared(model, **changes) -> DataPipeline:
    parts = {
        "actors": [model],
        "reward_models": [digits],
        "data": ROWS,
        "rollout_config": ROLLOUT,
        "train_config": TRAINING,
    }
    return DataPipeline(**{**parts, "overrides": ["tracker=none"], **changes})


@pytest.mark.exhaustive
def test_it_comes_to_what_the_trainer_comes_to_and_can_be_run_again(dir32):
    trainer = RLTrainer(pipeline=declared(dir32, data=None), data=ROWS)
    results = [trainer.run() for _ in range(2)]
    arguments = {"model": dir32, "reward_model": digits, "train_dataset": ROWS, "overrides": ["tracker=none"]}
    with Trainer(**arguments, rollout_config=ROLLOUT, train_config=TRAINING) as stepped:
        losses = [stepped.step() for _ in range(2)]
    for result in results:
        assert (result.status, result.steps) == ("finished", 2)
        assert result.last_metrics["actor/loss"] == losses[-1]
    by_epochs = {name: x for name, x in TRAINING.items() if name not in ("prompts_per_step", "total_steps")}
    lengths = {"rollout_config": {"max_length": 512}, "train_config": {**by_epochs, "num_epochs": 2}}
    result = RLTrainer(declared(dir32, critics=[dir32], data=ROWS[:5], **lengths)).run()
    assert (result.status, result.steps) == ("finished", 3)  # of five rows, which two mini-batches do not divide
    assert result.data == {"train_rows": 5, "train_duplicates": 0}


def test_a_critic_makes_it_ppo_unless_something_else_is_named(dir32):
    assert declared(dir32).arguments["algorithm"] == "grpo"
    assert declared(dir32, critics=[dir32]).arguments["algorithm"] == "ppo"
    named = declared(dir32, train_config={**TRAINING, "algorithm": "rloo"})
    assert named.arguments["algorithm"] == "rloo"
    assert "critic/loss" in RLTrainer(declared(dir32, critics=[dir32], references=[dir32])).run().last_metrics


@pytest.mark.slow
def test_several_rewards_are_a_weighted_sum_each_logged_by_its_name(dir32, tmp_path):
    path = save_random_classifier(tmp_path / "classifier", "qwen2")
    model = Pretrained(path=str(path)).load_classifier("cpu")
    rewards = [digits, {"reward": model, "weight": 0.5, "name": "style"}, {"reward": ExactMatch(), "weight": 2.0}]
    last = RLTrainer(declared(dir32, reward_models=rewards)).run().last_metrics
    total = last["reward/digits"] + 0.5 * last["reward/style"] + 2.0 * last["reward/exact_match"]
    assert last["reward/mean"] == pytest.approx(total, abs=1e-6)


def test_rewards_without_names_of_their_own_are_numbered():
    summed = summed_rewards([lambda prompts, responses: [1.0], digits, digits])
    assert isinstance(summed, WeightedSum)
    assert summed.weights == {"reward_1": 1.0, "digits": 1.0, "reward_3": 1.0}


def of(**parts):
    """What declares a pipeline with these parts."""
    return lambda dir32: declared(dir32, **parts)


def ran(**parts):
    """What runs it."""
    return lambda dir32: RLTrainer(declared(dir32, **parts)).run()


NAN = [{"reward": digits, "weight": float("nan")}]
NO_KL = ["tracker=none", "algorithm.kl.coef=0"]
test_what_a_run_cannot_have_is_refused_in_words = refused(
    ("actors", ["a", "b"], of(actors=["a", "b"])),
    ("critics", ["a", "b"], of(critics=["a", "b"])),
    ("actors", [], of(actors=[])),
    ("actors", "model", of(actors="model")),
    ("reward_models", "empty", of(reward_models=[])),
    ("reward_models", "<function digits", of(reward_models=digits)),
    ("reward_models[1]", 3, of(reward_models=[digits, 3])),
    ("reward_models[0].wieght", "weight", of(reward_models=[{"reward": digits, "wieght": 1}])),
    ("reward_models.weights.digits", "nan", ran(reward_models=NAN)),
    ("rollout.max_tokens", "rollout.max_new_tokens?", ran(rollout_config={"max_tokens": 5})),
    ("train_dataset", "int", ran(data=3)),
    ("train_dataset.train_files[0]", "no.jsonl", ran(data="no.jsonl")),
    ("eval_dataset", "train_dataset", ran(data=None, eval_data=[{"prompt": "1"}])),
    ("ref_model", "ref_model", ran(references=["m"], overrides=NO_KL)),
    ("model", "int", ran(actors=[3])),
    ("critic_model", "int", ran(critics=[3])),
)


def test_nobody_has_to_switch_models(model32, tokenizer):
    """A reward model in training mode and a policy in it give the numbers of models in evaluation mode."""
    results = []
    for mode in (True, False):
        torch.manual_seed(0)
        policy = model32.load_causal_lm("cpu").train(mode)
        for parameter in policy.parameters():
            parameter.requires_grad_(mode)
        results.append(RLTrainer(declared(policy, tokenizer=tokenizer)).run().last_metrics["actor/loss"])
    assert results[0] == results[1]
