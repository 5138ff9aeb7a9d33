"""Training on old rows too, a policy reaches the same reward with fewer responses drawn.

Every optimizer step has as many rows, and the same learning rate: half of them are old, or none. With old rows there
are two optimizer steps for each batch of new responses, and that is where the saving comes from.
"""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from trainer.runs import Echo, Prompts, ppo_run, read_lines

from verl.algorithms.advantages import GroupRelative
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.policy_losses import PPOClip
from verl.description import BuildContext
from verl.models.tiny import TinyModel
from verl.replay.settings import TieredReplay
from verl.rollout.hf import HFRollout
from verl.tracking.jsonl import JsonLines
from verl.tracking.trackers import Trackers

LETTERS = ("a", "b", "c", "d")
MODEL = TinyModel(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
ENOUGH, STEPS = 0.8, 40


def drawn_until_learned(replay_fraction: float, seed: int, directory) -> int:
    """Responses drawn until the mean reward of three steps in a row is enough."""
    algorithm = Algorithm(
        advantage=GroupRelative(), policy_loss=PPOClip(), replay_fraction=replay_fraction, replay_max_staleness=8,
        mini_batches=2 if replay_fraction else 1,  # an optimizer step has 64 rows in either case
    )  # fmt: skip
    run = ppo_run(
        MODEL, algorithm, lr=1e-2, reward=Echo(), rollout=HFRollout(max_new_tokens=5, min_new_tokens=3),
        data=Prompts(train=LETTERS, eval=()), prompts_per_step=4, group_size=16, total_steps=STEPS, seed=seed,
        save_final=False, tracker=Trackers(jsonl=JsonLines()),
        replay=TieredReplay(memory_mib=8, shard_mib=1) if replay_fraction else None,
    )  # fmt: skip
    run = dataclasses.replace(run, critic=None, reference=None)
    with run.build(BuildContext(run_dir=directory)) as trainer:
        trainer.fit()
    lines = [line for line in read_lines(directory / "metrics.jsonl") if "reward/mean" in line]
    rewards, drawn = [line["reward/mean"] for line in lines], [line["perf/samples"] for line in lines]
    for step in range(3, len(lines) + 1):
        if statistics.mean(rewards[step - 3 : step]) >= ENOUGH:
            return int(sum(drawn[:step]))
    return int(sum(drawn)) + 1


@pytest.mark.learning
def test_reuse_reaches_the_same_reward_with_fewer_responses(tmp_path):
    seeds = range(3)
    without = [drawn_until_learned(0.0, seed, tmp_path / f"new_{seed}") for seed in seeds]
    with_old = [drawn_until_learned(0.5, seed, tmp_path / f"old_{seed}") for seed in seeds]
    told = f"responses drawn per seed: {without} without, {with_old} with old rows"
    assert sum(with_old) < 0.8 * sum(without), told
