"""Each layout of processes with all that could tell it from one process: one table, every cell to 1e-9 in float64.

rows     packed lines with shared prompts, tokens masked in the midst of responses, uneven rows, a process without rows
models   whole, with an adapter and recomputed activations, with a tied embedding
runs     PPO and GRPO, from prompts to the weights after the last step
"""

import dataclasses
import functools
from collections.abc import Iterable

import pytest
import torch
from cases import short_where
from equivalence.one_update import rows_with_holes, same_update
from random_models import save_random_model
from same_training import ROUNDING, run_course, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

LAYOUTS = {
    "pp2": (2, Parallel(pp=2)),
    "cp2 allgather": (2, Parallel(cp=2)),
    "cp2 ulysses": (2, Parallel(cp=2, cp_style="ulysses")),
    "ep2": (2, Parallel(ep=2)),
    "tp2 pp2": (4, Parallel(tp=2, pp=2)),
    "pp2 dp2": (4, Parallel(pp=2, dp_replicate=2)),
    "pp2 dp2 gpipe": (4, Parallel(pp=2, dp_replicate=2, pp_schedule="gpipe")),
    "pp2 dp_shard2": (4, Parallel(pp=2, dp_shard=2)),
    "pp2 cp2": (4, Parallel(pp=2, cp=2)),
    "pp2 cp2 ulysses gpipe": (4, Parallel(pp=2, cp=2, cp_style="ulysses", pp_schedule="gpipe")),
    "pp4": (4, Parallel(pp=4, pp_micro_batches=3)),
    "cp2 dp_shard2": (4, Parallel(cp=2, dp_shard=2)),
}
KINDS = ("whole", "adapter", "tied")
ROWS = {
    "shared prompts, masked tokens, a row of one token": rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1]),
    "one row, so that others have none": rows_with_holes([4], 1, [7]),
}
# 5, 4 and 1 responses, or 9 and 3: counts that do not divide, and shares without rows
COURSES = {
    "ppo": (PPO_ALGORITHM, 1, [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]),
    "grpo": (GRPO_ALGORITHM, 3, [[2, 0, 5], [1]]),
}


def cells(work: Iterable[str], *short: str) -> pytest.MarkDecorator:
    """A test for each layout, kind of model and work; the short ones, "LAYOUT: KIND", are in `make test-all`."""
    every = [(layout, kind, name) for layout in LAYOUTS for kind in KINDS for name in work]
    return pytest.mark.parametrize("cell", short_where(every, lambda cell: f"{cell[0]}: {cell[1]}" in short), ids=str)


@pytest.fixture
def benches(two_processes, four_processes):
    return {2: two_processes, 4: four_processes}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """The float64 model of a cell."""

    @functools.cache
    def made(family: str, layers: int, tied: bool) -> Pretrained:
        options = {"num_hidden_layers": layers, "tie_word_embeddings": tied}
        path = save_random_model(tmp_path_factory.mktemp("models") / family, family, torch.float64, **options)
        return Pretrained(path=str(path), dtype="float64")

    # norms of starcoder2 stay in float64
    return lambda layout, kind: made(
        "qwen3_moe" if layout == "ep2" else "starcoder2", 4 if layout == "pp4" else 2, kind == "tied"
    )


@cells(ROWS, "pp2 dp2: whole", "pp2 dp2: adapter", "pp2 cp2: whole", "pp2 cp2: adapter")
def test_loss_scores_and_every_gradient_are_those_of_one_process(cell, benches, model_of):
    (layout, kind, rows), options = cell, {"tokens": 30, "exact": True}
    count, sharding = LAYOUTS[layout]
    if kind == "adapter":  # norms that a mixture computes again pass through float32
        options |= {"lora": LoRA(rank=2, target_modules=("q_proj", "v_proj")), "checkpointing": layout != "ep2"}
    same_update(benches[count], model_of(layout, kind), ROWS[rows], sharding, **options)


@cells(COURSES, "pp2 dp2: tied")
def test_steps_are_those_of_one_process(cell, benches, model_of, tmp_path):
    layout, kind, course = cell
    (count, sharding), (algorithm, group, prompts) = LAYOUTS[layout], COURSES[course]
    lora = LoRA(rank=2, target_modules=("q_proj", "v_proj")) if kind == "adapter" else None

    def run(**parts):
        made = ppo_run(model_of(layout, kind), algorithm, group_size=group, **parts)
        return dataclasses.replace(made, actor=dataclasses.replace(made.actor, lora=lora))

    alone = run_course(run(), prompts, tmp_path / "one")
    assert kind != "tied" or not any("lm_head" in key for key in alone.weights)
    spread = run(sharding=sharding, n_gpus_per_node=count, micro_batch_tokens=40)
    same_training(alone, benches[count].course(spread, prompts, tmp_path / "many").result(timeout=600), ROUNDING)
