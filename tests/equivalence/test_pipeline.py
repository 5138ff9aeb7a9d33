"""However a model is cut into stages, it learns what one process teaches it, to float64 rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from equivalence.courses import assert_same, run_course
from equivalence.laboratory import laboratory
from random_models import save_random_model
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = pytest.mark.xdist_group("two processes")

LAYOUTS = {
    "tp2 pp2": Parallel(pp=2, tp=2),
    "pp2 dp2": Parallel(pp=2, dp_replicate=2),
    "pp4": Parallel(pp=4, pp_micro_batches=3),
    "pp2 dp2 gpipe": Parallel(pp=2, dp_replicate=2, pp_schedule="gpipe"),
}
QUICK = ("tp2 pp2", "pp2 dp2")
IN_SHORT = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
# 5, 4 and 1 responses: counts that do not divide, shares without rows
PROMPTS = [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]


@pytest.fixture(scope="module")
def bench():
    with laboratory(4) as bench:
        yield bench


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


@pytest.mark.parametrize("name", IN_SHORT)
def test_ppo_through_stages_is_that_of_one_process(name, bench, alone, deep64, tmp_path):
    run = ppo_run(deep64, PPO_ALGORITHM, group_size=1, sharding=LAYOUTS[name], n_gpus_per_node=4, micro_batch_tokens=40)
    assert_same(alone, bench.course(run, PROMPTS, tmp_path).result(timeout=120))


CASES = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", IN_SHORT)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_grpo_of_a_tied_model_through_stages_is_that_of_one_process(family, name, bench, tmp_path):
    model = saved_model(tmp_path, family, tie_word_embeddings=True)

    def run(**parts):
        return ppo_run(model, GRPO_ALGORITHM, group_size=3, **parts)

    prompts = [[2, 0, 5], [1]]
    alone = run_course(run(), prompts, tmp_path / "one")
    assert not any("lm_head" in key for key in alone.weights)
    together = run(sharding=LAYOUTS[name], n_gpus_per_node=4)
    # norms of transformers pass through float32
    assert_same(alone, bench.course(together, prompts, tmp_path).result(), 1e-6 if family == "qwen3" else 1e-9)


@pytest.mark.parametrize("name", IN_SHORT)
def test_an_adapter_learns_the_same_through_stages(name, bench, deep64, tmp_path):
    def run(**parts):
        made = ppo_run(deep64, GRPO_ALGORITHM, group_size=3, **parts)
        return dataclasses.replace(
            made, actor=dataclasses.replace(made.actor, lora=LoRA(rank=2), gradient_checkpointing=bool(parts))
        )

    prompts = [[2, 0, 5], [1]]
    together = run(sharding=LAYOUTS[name], n_gpus_per_node=4)
    assert_same(run_course(run(), prompts, tmp_path / "one"), bench.course(together, prompts, tmp_path).result())
