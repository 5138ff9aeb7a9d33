"""Which GPU each worker of a Ray run has, on a cluster that was told of 8 GPUs: Ray counts them and needs none."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from devices.gpu_hosts import GpuHost

from verl.cluster.ray.ray_worker import own_gpu
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def eight_gpus(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")  # every worker sees every GPU
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.shutdown()  # of another module of this process
        ray.init(
            address="local", num_cpus=32, num_gpus=8, object_store_memory=80 * 2**20, include_dashboard=False,
            log_to_driver=False, configure_logging=False, runtime_env={"env_vars": {"PYTHONPATH": _tests()}},
        )  # fmt: skip
        yield
        ray.shutdown()


def _tests() -> str:
    return str(Path(__file__).parents[1])


ROLES = ("actor", "critic", "reference", "rm")


def documented_placements():
    """Settings of each row of the table of docs/scaling.md."""
    table = DOCUMENT.read_text().partition("| wanted | set |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    return {wanted: " ".join(re.findall("`([^`]*)`", settings)).split() for wanted, settings in rows}


def placed(settings):
    """The placement of a row, and its workers per pool that is not named."""
    keys = ("pools", "workers", "num_gpus", "strategy")
    given = [f"++trainer.placement.{one}" if one.startswith(keys) else one for one in settings]
    trainer = [] if any("n_gpus_per_node" in one for one in settings) else ["trainer.n_gpus_per_node=2"]
    sharding = [] if any(one.startswith("sharding") for one in settings) else ["sharding=ddp"]
    run = validate(compose_root("ppo", ["trainer=ray", *given, *trainer, *sharding]))
    return run.trainer.placement, run.trainer.n_gpus_per_node


@pytest.mark.slow
def test_every_row_of_the_document_is_a_placement():
    rows = documented_placements()
    assert len(rows) >= 4
    for settings in rows.values():
        placement, size = placed(settings)
        pools = placement.groups(ROLES)
        assert sorted(role for members in pools.values() for role in members) == sorted(ROLES)
        assert sum(placement.workers.get(pool, size) for pool in pools) <= 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("wanted", documented_placements())
def test_every_documented_placement_gives_each_worker_of_a_pool_a_gpu_of_its_own(eight_gpus, wanted):
    placement, size = placed(documented_placements()[wanted])
    placement = replace(placement, num_gpus=1, num_cpus=0.5, start_timeout_s=120.0)
    host = GpuHost(names=ROLES)
    cluster = placement.start(host, BuildContext(device="cuda:0"), size, 1)
    try:
        told = {role: [gpu for gpu, *_ in one.gpu().result()] for role, one in role_handles(cluster, host).items()}
    finally:
        cluster.close()
    pools = placement.groups(ROLES)
    used = {pool: told[members[0]] for pool, members in pools.items()}
    for pool, members in pools.items():
        assert len(set(used[pool])) == len(used[pool]) == placement.workers.get(pool, size)
        assert all(told[role] == used[pool] for role in members)
    others = [gpu for pool in used.values() for gpu in pool]
    assert len(set(others)) == len(others)


def test_a_worker_uses_the_gpu_that_ray_gave_it_whatever_it_sees():
    assert own_gpu(["5"], "5") == 0  # Ray shows it that one alone
    assert own_gpu(["5"], None) == 5  # it sees all
    assert own_gpu(["5"], "4,5,6") == 1  # all that the cluster was started with
    assert own_gpu(["GPU-b"], "GPU-a, GPU-b") == 1
    assert own_gpu([], None) == 0
