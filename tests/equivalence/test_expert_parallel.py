"""Processes that share the experts of a layer learn what one process learns, to float64 rounding."""

from __future__ import annotations

import pytest
import torch
from equivalence.courses import assert_same, run_course
from equivalence.laboratory import laboratory
from equivalence.one_update import one_update, rows_with_holes
from random_models import save_random_model
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.engines.sharding import NoSharding, Parallel
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = pytest.mark.xdist_group("two processes")

SHARED = rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1])  # shared prompts, uneven rows, a row of one token
SINGLE = rows_with_holes([1], 1, [2])  # of one row, one share is empty


@pytest.fixture(scope="module")
def bench():
    with laboratory(2) as bench:
        yield bench


@pytest.fixture(scope="module")
def four():
    with laboratory(4) as bench:
        yield bench


def made(path, family, **options):
    return Pretrained(path=str(save_random_model(path / family, family, torch.float64, **options)), dtype="float64")


def assert_equal_updates(bench, model, rows, sharding, tolerance=1e-9, **options):
    """What every process scores, and the loss and the gradients that all come to, are those of one process."""
    options["exact"] = tolerance < 1e-6
    wanted = one_update(model, NoSharding().build(BuildContext()), rows, **options)
    seen = set()
    for found in bench.updated(model, sharding, rows, options).result(timeout=120):
        gaps = {name: float((x - wanted[name]).abs().max()) for name, x in found.items()}
        assert {name: gap for name, gap in gaps.items() if not gap <= tolerance} == {}
        seen |= found.keys()
    assert seen == wanted.keys()


def test_loss_gradients_and_scores_are_those_of_one_process(bench, tmp_path):
    sharding, model = Parallel(ep=2), made(tmp_path, "qwen3_moe")
    for rows in (SHARED, SINGLE):
        assert_equal_updates(bench, model, rows, sharding)
    assert_equal_updates(
        bench, model, SHARED, sharding, tokens=10, lora=LoRA(rank=2, target_modules=("q_proj", "v_proj"))
    )  # many micro-batches
    assert_equal_updates(bench, model, SHARED, sharding, 1e-6, checkpointing=True)  # recomputed norms pass float32


def test_steps_of_ppo_and_grpo_are_those_of_one_process(bench, tmp_path):
    model = made(tmp_path, "qwen3_moe")
    for name, algorithm, group, prompts in (
        ("ppo", PPO_ALGORITHM, 1, [[0, 1, 2, 3, 4], [3]]),
        ("grpo", GRPO_ALGORITHM, 3, [[2, 0, 5], [1]]),
    ):
        alone = run_course(ppo_run(model, algorithm, group_size=group), prompts, tmp_path / name / "one")
        run = ppo_run(
            model, algorithm, group_size=group, sharding=Parallel(ep=2), n_gpus_per_node=2, micro_batch_tokens=40
        )
        assert_same(alone, bench.course(run, prompts, tmp_path / name / "two").result(timeout=120))
