"""Processes that share the experts of a layer learn what one process learns, to float64 rounding."""

import dataclasses

import pytest
import torch
from equivalence.one_update import rows_with_holes, same_update
from random_models import save_random_model
from same_training import ROUNDING, run_course, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.engines.tensor_parallel import PROVEN
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.exhaustive, pytest.mark.slow]

SHARED = rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1])  # shared prompts, uneven rows, a row of one token
SINGLE = rows_with_holes([1], 1, [2])  # of one row, one share is empty


def same(bench, model, rows, sharding, tolerance=1e-9, **options):
    same_update(bench, model, rows, sharding, tolerance, exact=tolerance < 1e-6, **options)


def made(path, family, **options):
    return Pretrained(path=str(save_random_model(path / family, family, torch.float64, **options)), dtype="float64")


def test_the_balance_loss_is_that_of_all_processes_together(two_processes, tmp_path):
    for options in ({"tokens": 100}, {"tokens": 10}, {"tokens": 100, "checkpointing": True}):
        tolerance = 1e-6 if "checkpointing" in options else 1e-9
        model = made(tmp_path, "qwen3_moe")
        same(two_processes, model, SHARED, Parallel(ep=2), tolerance, router_aux_loss_coef=0.5, **options)


@pytest.mark.parametrize("family", sorted(PROVEN))
def test_models_of_every_family_that_is_not_refused_train_the_same(family, two_processes, tmp_path):
    model = made(tmp_path, family)
    for rows in (SHARED, SINGLE):
        same(two_processes, model, rows, Parallel(ep=2))
    same(two_processes, model, SHARED, Parallel(ep=2), 1e-6, checkpointing=True)


@pytest.mark.parametrize(
    "sharding",
    [
        Parallel(ep=4),
        Parallel(ep=2),  # and the experts of a process over two
        Parallel(ep=2, dp_replicate=2),
        Parallel(ep=2, cp=2),
        Parallel(ep=2, cpu_offload=True),
        Parallel(ep=2, pp=2),
        Parallel(ep=2, pp=2, cp=2, dp_shard=1),
        Parallel(ep=2, cp=2, dp_replicate=2, cp_style="ulysses", strategy="SHARD_GRAD_OP"),
        Parallel(ep=4, cp=2),
    ],
    ids=lambda x: x.degrees(4).overrides() + " " + x.cp_style + " offload" * x.cpu_offload,
)
def test_four_processes_of_several_kinds_train_the_same(sharding, four_processes, tmp_path):
    model = made(tmp_path, "qwen3_moe")
    for rows in (SHARED, SINGLE):
        same(four_processes, model, rows, sharding, tokens=30)
    alone = run_course(ppo_run(model, PPO_ALGORITHM, group_size=1), [[0, 1, 2], [3]], tmp_path / "one")
    if sharding.pp > 1:  # a stage does not see what all routers choose
        alone.metrics = {
            step: {k: x for k, x in line.items() if "/expert_" not in k and "/router_" not in k}
            for step, line in alone.metrics.items()
        }
    run = ppo_run(model, PPO_ALGORITHM, group_size=1, sharding=sharding, n_gpus_per_node=4, micro_batch_tokens=40)
    same_training(alone, four_processes.course(run, [[0, 1, 2], [3]], tmp_path / "four").result(timeout=120), ROUNDING)


@pytest.mark.parametrize("sharding", [Parallel(ep=4), Parallel(ep=2)], ids=["ep=4", "ep=2"])
def test_weights_and_moments_of_experts_are_held_once(sharding, four_processes, tmp_path):
    options = {"num_experts": 8, "moe_intermediate_size": 64}
    model = Pretrained(path=str(save_random_model(tmp_path / "model", "qwen3_moe", torch.float32, **options)))
    cost = sharding.cost(4, model_stats(model.load_config()))
    run = ppo_run(model, dataclasses.replace(GRPO_ALGORITHM, mini_batches=1), sharding=sharding, n_gpus_per_node=4)
    for held in four_processes.held(run, [0, 1], tmp_path / "runs").result(timeout=120):
        assert held["weights"] == pytest.approx(cost.weights, rel=0.05)
        assert held["optimizer"] == pytest.approx(cost.optimizer, rel=0.05)


def test_sampled_tokens_have_the_experts_again_that_they_were_sampled_with(two_processes, tmp_path):
    model, rollout = made(tmp_path, "qwen3_moe"), HFRollout(max_new_tokens=6, router_replay=True)
    alone = run_course(ppo_run(model, PPO_ALGORITHM, group_size=2, rollout=rollout), [[2, 0], [1]], tmp_path / "one")
    options = {"sharding": Parallel(ep=2), "n_gpus_per_node": 2, "micro_batch_tokens": 40}
    run = ppo_run(model, PPO_ALGORITHM, group_size=2, rollout=rollout, **options)
    found = two_processes.course(run, [[2, 0], [1]], tmp_path / "two").result(timeout=120)
    assert all(metrics["rollout/log_prob_gap_nats"] < 1e-6 for metrics in found.metrics.values())
    same_training(alone, found, 1e-6)  # weights of experts are made of logits in float32, and so is the sampled gap
