"""Which processes share an engine of several GPUs, and whose rows are whose: four ranks, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rollout.engines import random_prompts

from verl.cluster.local_worker_group import device_of_rank
from verl.cluster.placement import ROLES, DeviceMesh
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.models.parallel_info import ParallelInfo
from verl.resharding.layout import Mesh
from verl.rollout.vllm.client.engine_args import gpu_name
from verl.rollout.vllm.sync import sharded_client
from verl.rollout.vllm.sync.sharded_client import ShardedVLLMClient, with_engine_group

RANKS = 4


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """What groups of processes were asked for; there are no processes behind them."""
    found = []
    monkeypatch.setattr(
        dist, "new_subgroups_by_enumeration", lambda ranks: found.append(ranks) or (f"group {len(found)}", [])
    )
    return found


def divided_of(rank, num_siblings=1, device="cuda", ranks=RANKS, per_machine=RANKS):
    """A rank of an FSDP model, or of one with tensor-parallel siblings."""
    mesh = Mesh((("replicate", 1), ("shard", ranks // num_siblings), ("tensor", num_siblings)))
    where = torch.device(f"{device}:{rank % per_machine}" if device == "cuda" else device)
    first = rank // num_siblings * num_siblings
    siblings = tuple(range(first, first + num_siblings))
    return ParallelInfo(
        device=where,
        mesh=mesh,
        rank=rank,
        siblings=siblings,
        sibling_group=None,
        layout_of=lambda x: None,
        local=lambda x: x,
    )


def test_an_engine_of_two_gpus_is_shared_by_two_ranks_and_engines_never_overlap(monkeypatch, groups):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shared = [with_engine_group(divided_of(rank), 2) for rank in range(RANKS)]
    assert [own.siblings for own in shared] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert groups == [[[0, 1], [2, 3]]] * RANKS  # the same question in every process, in one order
    names = [gpu_name(str(own.device)) for own in shared]
    of_engines = [[names[rank] for rank in own.siblings] for own in shared if own.rank == own.siblings[0]]
    assert of_engines == [["4", "5"], ["6", "7"]]


@pytest.mark.parametrize(
    ("ranks", "same", "size"),
    [(8, 1, 1), (8, 1, 2), (8, 1, 4), (8, 1, 8), (4, 2, 2), (4, 2, 4), (64, 8, 8), (64, 4, 8)],
)
def test_engines_of_machines_with_eight_gpus_have_those_of_their_ranks_and_no_two_the_same(
    ranks, same, size, monkeypatch
):
    """FSDP over one machine, tensor-parallel pairs, and tp_fsdp over eight machines, as docs/scaling.md has them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shared = [with_engine_group(divided_of(rank, same, ranks=ranks, per_machine=8), size) for rank in range(ranks)]
    gpus = [(own.rank // 8, gpu_name(str(own.device))) for own in shared]
    engines = [[gpus[rank] for rank in own.siblings] for own in shared if own.rank == own.siblings[0]]
    assert all(own.rank in own.siblings for own in shared)
    assert all(len(engine) == size and len({machine for machine, _ in engine}) == 1 for engine in engines)
    assert sorted(gpu for engine in engines for gpu in engine) == sorted(gpus)
    assert len(set(gpus)) == ranks


def test_processes_of_one_machine_and_of_each_sub_mesh_have_devices_of_their_own(monkeypatch):
    assert [device_of_rank("cuda:0", rank) for rank in range(8)] == [f"cuda:{rank}" for rank in range(8)]
    monkeypatch.setattr("verl.cluster.placement.num_gpus_of", lambda devices: 2)
    document = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    on_command_line = re.search(r"trainer=mesh (.*)", document)
    in_script = re.search(r"mesh = (DeviceMesh\(.*\))", document)
    assert on_command_line
    assert in_script
    settings = [f"++{one}" for one in on_command_line[1].split()]
    run = validate(compose_root("ppo", ["trainer=mesh", "sharding=ddp", *settings]))
    for mesh in (run.trainer.placement, eval(in_script[1], {"DeviceMesh": DeviceMesh})):
        for devices in mesh.groups(ROLES):
            assert len(set(devices)) == len(devices) > 0
            assert set(devices) <= {"cuda:0", "cuda:1"}


def test_tensor_parallel_siblings_keep_their_engine_and_a_cpu_keeps_one_for_each(groups):
    pair = divided_of(1, 2)
    assert with_engine_group(pair, 2) is pair
    assert with_engine_group(pair, 1) is pair
    alone = divided_of(1, 1, "cpu")
    assert with_engine_group(alone, 2) is alone
    assert not groups


def test_ranks_that_make_no_groups_of_that_size_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3: 4 processes, of which 1 share the same rows"):
        with_engine_group(divided_of(0), 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3: 4 processes, of which 2 share the same rows"):
        with_engine_group(divided_of(0, 2), 3)


@pytest.mark.parametrize("same", [1, 2], ids=["fsdp", "tensor-parallel pairs"])
def test_the_prompts_of_a_group_go_to_its_engine_and_each_rank_finds_its_own_rows(same, monkeypatch):
    """Four ranks with one engine: each with rows of its own, or pairs with the same."""
    prompts, samples = random_prompts(), 2
    starts = [0, 3, 5, 6, 6]  # of different numbers; the last has none
    own = [prompts[starts[rank // same] : starts[rank // same + 1]] for rank in range(RANKS)]
    monkeypatch.setattr(sharded_client, "among_siblings", lambda divided, value: [own[r] for r in divided.siblings])
    for rank in range(RANKS):
        client = object.__new__(ShardedVLLMClient)
        client.divided, client.num_same_rows = with_engine_group(divided_of(rank, same), RANKS), same
        whole, rows = client.of_group(own[rank], samples)
        assert whole["prompt_ids"].tolist() == list(range(starts[RANKS // same]))  # no prompt twice
        asked = whole["prompt_ids"].repeat_interleave(samples)[rows]
        assert asked.tolist() == own[rank]["prompt_ids"].repeat_interleave(samples).tolist()
