"""Roles on devices of this machine: who lives where, the same numbers as in one process, and what is refused."""

import os

import pytest
from cluster.processes_of import wait_until_gone, workers_of
from random_models import save_random_classifier
from rewards.rated import described
from same_training import run_course, same_training
from trainer.runs import PPO_ALGORITHM, ppo_run

import verl
from verl.cluster.placement import DeviceMesh
from verl.cluster.ray.ray_placement import RayPlacement
from verl.engines.sharding import DDP, NoSharding

pytestmark = pytest.mark.xdist_group("cluster")
ROLES = ("actor", "critic", "reference", "rm")
TWO, FIRST, SECOND, ALONE = ("cpu:0", "cpu:1"), ("cpu:0",), ("cpu:1",), ("rollout",)
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("sub_meshes", "groups"),
    [
        ({}, [(TWO, ROLES), (FIRST, ALONE)]),
        ({"critic": ["cpu:1"]}, [(FIRST, ("actor", "reference", "rm")), (SECOND, ("critic",)), (FIRST, ALONE)]),
        (
            {"critic": ["cpu:1"], "rm": ["cpu:1"]},
            [(FIRST, ("actor", "reference")), (SECOND, ("critic", "rm")), (FIRST, ALONE)],
        ),
        ({"rollout": ["cpu:1"]}, [(FIRST, ROLES), (SECOND, ALONE)]),
        ({"rm": ["cpu:2"]}, [(TWO, ("actor", "critic", "reference")), (("cpu:2",), ("rm",)), (FIRST, ALONE)]),
        ({"rm": ["cpu:0"], "critic": TWO}, [(TWO, ("actor", "critic", "reference")), (FIRST, ("rm",)), (FIRST, ALONE)]),
    ],
)
def test_a_role_lives_where_it_is_put_and_the_others_where_nobody_is(sub_meshes, groups):
    mesh = verl.DeviceMesh(devices=TWO, sub_meshes=sub_meshes)
    assert mesh.groups([*ROLES, *ALONE]) == groups
    if "rollout" not in sub_meshes:
        assert mesh.groups(ROLES) == groups[:-1]


@pytest.mark.parametrize(
    ("options", "pools"),
    [
        ({}, {"main": 2, "rollout": 1}),
        ({"pools": {"a": ["actor"], "b": ["rollout"]}, "in_driver": ["critic", "rm"]}, {"a": 2, "b": 1}),
    ],
)
def test_the_sampler_has_a_ray_worker_of_its_own(options, pools):
    placement, roles = RayPlacement(**options), [*ROLES, *ALONE]
    assert dict(zip(placement.groups(roles), (count for _, count in placement.worker_groups(roles, 2)))) == pools
    assert placement.sizes(roles, 2)["rollout"] == 1


@pytest.mark.parametrize(
    ("given", "sharding", "size", "fault"),
    [
        ({"devices": ["cpu:0", "cpu:4096"]}, DDP(), 1, "devices has cpu:4096: this machine has "),
        ({"devices": ["cuda:64"]}, DDP(), 1, "devices has cuda:64: this machine has "),
        ({"devices": ["cpu:0"]}, DDP(), 2, "Set trainer.n_gpus_per_node=1, not 2"),
        ({"devices": ["cpu:0"]}, NoSharding(), 1, None),
    ],
)
def test_a_mesh_that_this_machine_or_run_cannot_have_is_refused(given, sharding, size, fault):
    mesh = DeviceMesh(**given)
    found = " ".join([*mesh.faults_with(dict.fromkeys(ROLES, sharding), size), *mesh.machine_faults()])
    assert fault in found if fault else not found


def test_a_role_on_two_devices_needs_a_sharding():
    faults = list(DeviceMesh(devices=TWO).faults_with({"actor": NoSharding()}, 1))
    assert any("sharding=none is for one device" in fault for fault in faults)


@pytest.mark.exhaustive
@needs_two_cores
def test_roles_on_devices_of_their_own_train_what_one_process_does(model64, tmp_path):
    judge = described(save_random_classifier(tmp_path / "judge", "llama"), normalize="running")
    prompts = [[0, 1, 2], [3]]
    alone = run_course(ppo_run(model64, PPO_ALGORITHM, reward=judge), prompts, tmp_path / "one")
    mesh = DeviceMesh(devices=TWO, sub_meshes={"critic": ["cpu:1"], "rm": ["cpu:1"]})  # type: ignore
    run = ppo_run(model64, PPO_ALGORITHM, reward=judge, placement=mesh)
    together = run_course(run, prompts, tmp_path / "mesh")
    same_training(alone, together)
    assert wait_until_gone(workers_of(os.getpid())) == []
    assert {file.parent.name for file in (tmp_path / "mesh/workers").rglob("*.log")} == {"actor_reference", "critic_rm"}
