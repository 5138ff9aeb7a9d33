"""Processes that share the tokens of the same rows learn what one process learns, to float64 rounding."""

from __future__ import annotations

import pytest
from equivalence.courses import assert_same, run_course
from equivalence.laboratory import laboratory
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel

pytestmark = pytest.mark.xdist_group("two processes")

STYLES = ("allgather", "ulysses")


@pytest.fixture(scope="module")
def bench():
    with laboratory(2) as bench:
        yield bench


@pytest.mark.parametrize("style", STYLES)
def test_ppo_and_grpo_steps_are_those_of_one_process(style, bench, model64, tmp_path):
    sharding = Parallel(cp=2, cp_style=style)
    for name, algorithm, group, prompts in (
        ("ppo", PPO_ALGORITHM, 1, [[0, 1, 2, 3, 4], [3]]),
        ("grpo", GRPO_ALGORITHM, 3, [[2, 0, 5], [1]]),
    ):
        alone = run_course(ppo_run(model64, algorithm, group_size=group), prompts, tmp_path / name / "one")
        run = ppo_run(model64, algorithm, group_size=group, sharding=sharding, n_gpus_per_node=2, micro_batch_tokens=40)
        assert_same(alone, bench.course(run, prompts, tmp_path / name / "two").result(timeout=120))
