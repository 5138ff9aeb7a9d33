"""However a model's weights are divided over processes, it learns what one process teaches it, to float64 rounding."""

from __future__ import annotations

import pytest
from equivalence.courses import assert_same, run_course
from equivalence.laboratory import laboratory
from trainer.runs import PPO, ppo_run

from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP

pytestmark = pytest.mark.xdist_group("two processes")

SHARDINGS = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "shard_grad_op": FSDP(strategy="SHARD_GRAD_OP"),
    "offload": FSDP(cpu_offload=True),
    "hsdp": HSDP(),
    "tp": TP(tensor_parallel=2),  # and two shares of rows
    "tp_fsdp": TPFSDP(),
}
# 5, 4 and 1 responses: counts that do not divide, shares without rows
PROMPTS = [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]


@pytest.fixture(scope="module")
def bench():
    with laboratory(4) as bench:
        yield bench


@pytest.fixture(scope="module")
def alone(model64, tmp_path_factory):
    """What one process comes to."""
    return run_course(ppo_run(model64, PPO, group_size=1), PROMPTS, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", SHARDINGS)
def test_four_processes_train_as_one_does(name, bench, alone, model64, tmp_path):
    run = ppo_run(model64, PPO, group_size=1, sharding=SHARDINGS[name], n_gpus_per_node=4, micro_batch_tokens=40)
    assert_same(alone, bench.course(run, PROMPTS, tmp_path).result(timeout=120))
