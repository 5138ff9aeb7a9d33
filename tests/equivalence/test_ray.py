"""Roles in Ray actors train exactly what they train in the driver's own process, and share its checkpoints."""

from dataclasses import replace

import pytest
from cluster.ray_here import placed
from same_training import ROUNDING, STEPS, course, digest, newest, run_course, same_training
from same_training import numbers as all_numbers
from trainer.runs import PPO_ALGORITHM, fit, ppo_run

from verl.engines.sharding import DDP, FSDP

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_here"), pytest.mark.slow]

PROMPTS = [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]  # counts that do not divide, and a worker without rows


def numbers(run_dir):
    """Without memory, which depends on where the roles live."""
    lines = all_numbers(run_dir)
    return {step: {k: v for k, v in line.items() if k != "perf/peak_memory_mib"} for step, line in lines.items()}


def test_one_worker_trains_bit_by_bit(model64, tmp_path):
    alone = run_course(ppo_run(model64, PPO_ALGORITHM), PROMPTS, tmp_path / "local")
    one = ppo_run(model64, PPO_ALGORITHM, placement=placed())
    same_training(alone, run_course(one, PROMPTS, tmp_path / "one"))


@pytest.mark.exhaustive
def test_two_workers_train_to_rounding_and_roles_may_live_apart(model64, tmp_path):
    alone = run_course(ppo_run(model64, PPO_ALGORITHM), PROMPTS, tmp_path / "local")
    two = ppo_run(
        model64,
        PPO_ALGORITHM,
        sharding=DDP(timeout_s=60.0),
        n_gpus_per_node=2,
        # two actors, one critic, and the reference in this process
        placement=placed(pools={"values": ("critic",)}, workers={"values": 1}, in_driver=("reference",)),
    )
    own = replace(two, actor=replace(two.actor, sharding=FSDP(timeout_s=60.0)))
    same_training(alone, run_course(own, PROMPTS, tmp_path / "two"), ROUNDING)


@pytest.mark.exhaustive
def test_a_checkpoint_made_under_ray_resumes_without_it_and_the_reverse(model32, tmp_path):
    fit(course(model32, tmp_path / "whole"), tmp_path / "whole/run")
    under_ray = {"placement": placed()}
    chain = [({}, 1), (under_ray, 3), ({}, None)]
    for leg, (options, stop) in enumerate(chain):
        resume = "latest" if leg else None
        run = course(model32, tmp_path / "chain", resume=resume, stop_after=stop, **options)
        fit(run, tmp_path / f"chain/run_{leg}")
    assert newest(tmp_path / "chain").step == STEPS
    assert digest(tmp_path / "chain") == digest(tmp_path / "whole")
    made = [numbers(tmp_path / f"chain/run_{leg}") for leg in range(len(chain))]
    assert made[0] | made[1] | made[2] == numbers(tmp_path / "whole/run")
