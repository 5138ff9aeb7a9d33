"""However a model is cut into stages, it learns what one process teaches it, to float64 rounding."""

from __future__ import annotations

import pytest
import torch
from equivalence.one_update import rows_with_holes, same_update
from random_models import save_random_model
from same_training import ROUNDING, run_course, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

LAYOUTS = {
    "tp2 pp2": Parallel(pp=2, tp=2),
    "pp2 dp2": Parallel(pp=2, dp_replicate=2),
    "pp4": Parallel(pp=4, pp_micro_batches=3),
    "pp2 fsdp2": Parallel(pp=2, dp_shard=2),
    "pp2 cp2": Parallel(pp=2, cp=2),
    "pp2 cp2 ulysses": Parallel(pp=2, cp=2, cp_style="ulysses", pp_schedule="gpipe"),
    "pp2 dp2 gpipe": Parallel(pp=2, dp_replicate=2, pp_schedule="gpipe"),
}


def in_short(*quick):
    """All layouts, those that are not named in the exhaustive suite alone."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]


# 5, 4 and 1 responses: counts that do not divide, shares without rows
PROMPTS = [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]


@pytest.fixture(scope="module")
def bench(four_processes):
    return four_processes


def saved_model(directory, family="qwen2", **options):
    path = save_random_model(directory / "model", family, torch.float64, num_hidden_layers=4, **options)
    return Pretrained(path=str(path), dtype="float64")


@pytest.fixture(scope="module")
def deep64(tmp_path_factory):
    """A float64 model of four layers."""
    return saved_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(deep64, tmp_path_factory):
    """What one process comes to."""
    return run_course(ppo_run(deep64, PPO_ALGORITHM, group_size=1), PROMPTS, tmp_path_factory.mktemp("one"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", in_short("pp2 dp2"))
def test_ppo_through_stages_is_that_of_one_process(name, bench, alone, deep64, tmp_path):
    run = ppo_run(deep64, PPO_ALGORITHM, group_size=1, sharding=LAYOUTS[name], n_gpus_per_node=4, micro_batch_tokens=40)
    same_training(alone, bench.course(run, PROMPTS, tmp_path).result(timeout=120), ROUNDING)


@pytest.mark.parametrize("name", in_short("pp2 dp2"))
@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.exhaustive), "llama"])
def test_grpo_of_a_tied_model_through_stages_is_that_of_one_process(family, name, bench, tmp_path):
    model = saved_model(tmp_path, family, tie_word_embeddings=True)

    def run(**parts):
        return ppo_run(model, GRPO_ALGORITHM, group_size=3, **parts)

    prompts = [[2, 0, 5], [1]]
    alone = run_course(run(), prompts, tmp_path / "one")
    assert not any("lm_head" in key for key in alone.weights)
    together = run(sharding=LAYOUTS[name], n_gpus_per_node=4)
    # norms of transformers pass through float32
    same_training(alone, bench.course(together, prompts, tmp_path).result(), 1e-6 if family == "qwen3" else 1e-9)


def assert_equal_updates(bench, model, sharding):
    """Tokens masked in the midst of a response, shared prompts, a row of one token, a replica without rows."""
    for rows, options in (
        (rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1]), {"tokens": 30}),
        (rows_with_holes([9, 3], 2, [8, 5]), {"lora": LoRA(rank=2), "checkpointing": True}),
        (rows_with_holes([4], 1, [7]), {}),
    ):
        same_update(bench, model, rows, sharding, **options)


@pytest.mark.parametrize("name", in_short("pp2 dp2", "pp2 cp2"))
def test_scores_loss_and_every_gradient_of_rows_with_masked_tokens_are_those_of_one_process(
    name, bench, model64, tmp_path
):
    layout = LAYOUTS[name]
    assert_equal_updates(bench, model64 if layout.pp <= 2 else saved_model(tmp_path, "starcoder2"), layout)
