"""What training on old rows too saves: against one pass over new responses much, against two passes nothing.

Every optimizer step has 64 rows and the same learning rate. With old rows, half of those of a step, there are two
optimizer steps for each batch of 64 new responses. So the fair comparison is with two passes over the new ones.
"""

import dataclasses
import statistics
from pathlib import Path

import pytest
from trainer.runs import JSONL, Echo, Prompts, fit, ppo_run, read_lines

from verl.algorithms.advantages import GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.losses import PPOClip
from verl.models.tiny import TinyModel
from verl.replay.config import TieredReplay
from verl.rollout.hf import HFRollout

pytestmark = pytest.mark.slow

LETTERS = ("a", "b", "c", "d")
MODEL = TinyModel(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
ENOUGH, STEPS = 0.8, 40


COURSES = {
    "one pass": {},
    "two passes": {"epochs": 2},
    "old rows": {"replay_fraction": 0.5, "replay_max_staleness": 8, "mini_batches": 2},
}


def drawn_until_learned(course: str, seed: int, directory: Path) -> int:
    """Responses drawn until the mean reward of three steps in a row is enough."""
    algorithm = Algorithm(advantage=GRPO(), policy_loss=PPOClip(), **COURSES[course])
    run = ppo_run(
        MODEL, algorithm, lr=1e-2, reward=Echo(), rollout=HFRollout(max_new_tokens=5, min_new_tokens=3),
        data=Prompts(train=LETTERS, eval=()), prompts_per_step=4, group_size=16, total_steps=STEPS, seed=seed,
        save_final=False, tracker=JSONL,
        replay=TieredReplay(memory_mib=8, shard_mib=1) if algorithm.replay_fraction else None,
    )  # fmt: skip
    run = dataclasses.replace(run, critic=None, reference=None)
    fit(run, directory)
    lines = [line for line in read_lines(directory / "metrics.jsonl") if "reward/mean" in line]
    rewards, drawn = [line["reward/mean"] for line in lines], [line["perf/samples"] for line in lines]
    for step in range(3, len(lines) + 1):
        if statistics.mean(rewards[step - 3 : step]) >= ENOUGH:
            return int(sum(drawn[:step]))
    return int(sum(drawn)) + 1


@pytest.mark.exhaustive
@pytest.mark.learning
def test_old_rows_save_responses_against_one_pass_and_cost_none_against_two(tmp_path):
    drawn = {
        course: [drawn_until_learned(course, seed, tmp_path / f"{course}_{seed}") for seed in range(3)]
        for course in COURSES
    }
    one, two, old = (sum(drawn[course]) for course in COURSES)
    assert old < 0.8 * one, drawn
    assert 0.8 * two < old < 1.2 * two, drawn
