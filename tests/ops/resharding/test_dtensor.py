"""The layout of a tensor over processes, and what each of them holds, checked against what torch has put there."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl.ops.resharding.dtensor import is_divided, local, mesh_dims, own_box, read_slice_like, tensor_layout
from verl.ops.resharding.layout import Mesh

MESH = Mesh((("shard", 2), ("tensor", 2)))


@pytest.fixture(params=range(4))
def rank(request):
    """This process as one of four; the others do not answer, and no question is asked of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def distributed(x, placements):
    """A tensor over shard and tensor, as FSDP of a tensor-parallel layer makes it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def test_each_rank_holds_the_box_that_its_layout_says(rank):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = torch.arange(30.0).view(5, 6)  # 5 rows: pieces of unequal size
    for placements, splits in [
        ((Shard(0), Replicate()), (("shard", 0),)),
        ((Shard(0), Shard(1)), (("shard", 0), ("tensor", 1))),
        ((Replicate(), Shard(1)), (("tensor", 1),)),
    ]:
        x = distributed(whole, placements)
        layout = tensor_layout(x)
        assert (layout.shape, layout.splits, layout.itemsize) == ((5, 6), splits, 4)
        box = layout.box(MESH, rank)
        assert torch.equal(local(x), whole[tuple(slice(a, b) for a, b in box)])
        assert own_box(x) == box
        again = read_slice_like(x, whole * 2)
        assert torch.equal(local(again), local(x) * 2)
        assert again.placements == x.placements
    x = distributed(torch.zeros(8), (Shard(0), Shard(0)))
    strided = type(x).from_local(local(x), x.device_mesh, (_StridedShard(0, split_factor=2), Shard(0)), run_check=False)
    assert tensor_layout(strided).splits == (("tensor", 0), ("shard", 0))  # FSDP divides what tensor parallelism left


def test_a_tensor_of_one_process_is_whole():
    x = torch.ones(2, 3, dtype=torch.float64)
    assert not is_divided(x)
    assert local(x) is x
    assert mesh_dims(x) == ()
    assert (tensor_layout(x).splits, tensor_layout(x).itemsize) == ((), 8)
    copy = read_slice_like(x, x)
    assert torch.equal(copy, x)
    assert copy is not x
