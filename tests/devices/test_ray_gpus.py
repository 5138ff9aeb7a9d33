"""Which GPU each worker of a Ray run has, on a cluster that was told of 8 GPUs: Ray counts them and needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from devices.gpu_hosts import GpuHost

from verl.cluster.ray.ray_placement import RayPlacement
from verl.cluster.ray.ray_worker import own_gpu
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import ConfigError

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def eight_gpus(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")  # every worker sees every GPU
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.init(
            address="local", num_cpus=32, num_gpus=8, object_store_memory=80 * 2**20, include_dashboard=False,
            log_to_driver=False, configure_logging=False, runtime_env={"env_vars": {"PYTHONPATH": _tests()}},
        )  # fmt: skip
        yield
        ray.shutdown()


def _tests() -> str:
    return str(Path(__file__).parents[1])


def test_workers_of_a_pool_never_share_a_gpu_and_pools_with_half_of_one_share_them_worker_by_worker(eight_gpus):
    placement = RayPlacement(
        pools={"main": ("actor",), "values": ("critic",), "judge": ("reference",)},
        workers={"values": 1, "judge": 1},
        num_gpus=0.5,
        num_cpus=0.5,
        start_timeout_s=60.0,
    )
    host = GpuHost(names=("actor", "critic", "reference"))
    cluster = placement.start(host, BuildContext(device="cuda:0"), 2, 1)
    try:
        handles = role_handles(cluster, host)
        told = {role: [device for device, _ in handle.gpu().result()] for role, handle in handles.items()}
    finally:
        cluster.close()
    assert len(set(told["actor"])) == 2  # NCCL refuses two ranks on one GPU
    assert told["critic"] == told["actor"][:1]  # half of the same one
    assert told["reference"][0] not in told["actor"]  # two halves fill a GPU
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]


def test_a_worker_uses_the_gpu_that_ray_gave_it_whatever_it_sees():
    assert own_gpu(["5"], "5") == 0  # Ray shows it that one alone
    assert own_gpu(["5"], None) == 5  # it sees all
    assert own_gpu(["5"], "4,5,6") == 1  # all that the cluster was started with
    assert own_gpu(["GPU-b"], "GPU-a, GPU-b") == 1
    assert own_gpu([], None) == 0


@pytest.mark.parametrize(
    ("gpus", "shared"),
    [
        (0.5, [["a", "b"], ["c"]]),
        (1 / 3, [["a", "b", "c"]]),
        (0.4, [["a", "b"], ["c"]]),
        (1.0, [["a"], ["b"], ["c"]]),
        (0.0, [["a"], ["b"], ["c"]]),
    ],
)
def test_pools_share_as_many_as_their_fractions_fill_a_gpu(gpus, shared):
    assert RayPlacement.sharing(["a", "b", "c"], gpus) == shared


def test_a_fraction_above_one_is_refused():
    with pytest.raises(ConfigError, match=r"num_gpus is 1\.5: a worker has a part of one GPU, or whole ones"):
        RayPlacement(num_gpus=1.5)
