"""Each layout of processes with all that could tell it from one process: one table, every cell to 1e-9 in float64.

rows     packed lines with shared prompts, tokens masked in the midst of responses, uneven rows, a process without rows
models   whole, with an adapter and recomputed activations, with a tied embedding
runs     PPO and GRPO, from prompts to the weights after the last step
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from equivalence.one_update import rows_with_holes, same_update
from random_models import save_random_model
from same_training import ROUNDING, run_course, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.exhaustive, pytest.mark.slow]

LAYOUTS = {
    "pp2": (2, Parallel(pp=2)),
    "cp2 allgather": (2, Parallel(cp=2)),
    "cp2 ulysses": (2, Parallel(cp=2, cp_style="ulysses")),
    "ep2": (2, Parallel(ep=2)),
    "tp2 pp2": (4, Parallel(tp=2, pp=2)),
    "pp2 dp2": (4, Parallel(pp=2, dp_replicate=2)),
    "cp2 dp_shard2": (4, Parallel(cp=2, dp_shard=2)),
}
ROWS = {
    "shared prompts, masked tokens, a row of one token": rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1]),
    "one row, so that others have none": rows_with_holes([4], 1, [7]),
}
# 5, 4 and 1 responses, or 9 and 3: counts that do not divide, and shares without rows
COURSES = {
    "ppo": (PPO_ALGORITHM, 1, [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]),
    "grpo": (GRPO_ALGORITHM, 3, [[2, 0, 5], [1]]),
}


@pytest.fixture(params=LAYOUTS)
def layout(request, two_processes, four_processes):
    """(name, processes, sharding, bench)"""
    count, sharding = LAYOUTS[request.param]
    return request.param, count, sharding, two_processes if count == 2 else four_processes


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A float64 model by what it has: experts or not, a tied embedding or not."""
    directory, found = tmp_path_factory.mktemp("models"), {}
    for experts, tied in ((False, False), (False, True), (True, False), (True, True)):
        family = "qwen3_moe" if experts else "starcoder2"  # whose norms stay in float64
        path = directory / f"{family} {tied}"
        save_random_model(path, family, torch.float64, tie_word_embeddings=tied)
        found[experts, tied] = Pretrained(path=str(path), dtype="float64")
    return found


@pytest.mark.parametrize("kind", ["whole", "adapter", "tied"])
@pytest.mark.parametrize("rows", ROWS)
def test_loss_scores_and_every_gradient_are_those_of_one_process(rows, kind, layout, models):
    name, _, sharding, bench = layout
    model, options = models[name == "ep2", kind == "tied"], {"tokens": 30, "exact": True}
    if kind == "adapter":  # norms that a mixture computes again pass through float32
        options |= {"lora": LoRA(rank=2, target_modules=("q_proj", "v_proj")), "checkpointing": name != "ep2"}
    same_update(bench, model, ROWS[rows], sharding, **options)


@pytest.mark.parametrize("kind", ["whole", "adapter", "tied"])
@pytest.mark.parametrize("course", COURSES)
def test_steps_are_those_of_one_process(course, kind, layout, models, tmp_path):
    (name, count, sharding, bench), (algorithm, group, prompts) = layout, COURSES[course]
    lora = LoRA(rank=2, target_modules=("q_proj", "v_proj")) if kind == "adapter" else None

    def run(**parts):
        made = ppo_run(models[name == "ep2", kind == "tied"], algorithm, group_size=group, **parts)
        return dataclasses.replace(made, actor=dataclasses.replace(made.actor, lora=lora))

    alone = run_course(run(), prompts, tmp_path / "one")
    spread = run(sharding=sharding, n_gpus_per_node=count, micro_batch_tokens=40)
    same_training(alone, bench.course(spread, prompts, tmp_path / "many").result(timeout=600), ROUNDING)
