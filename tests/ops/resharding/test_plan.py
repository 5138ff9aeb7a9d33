"""Plans between layouts: every rank ends with what it wants, and nothing travels that need not."""

import itertools
from pathlib import Path

import pytest
import torch
from refusals import refused

from verl.ops.resharding.layout import Layout, Mesh, TensorLayout
from verl.ops.resharding.plan import Plan, gathering_volume, lower_bound, reshard_plan

with pytest.MonkeyPatch.context() as patched:  # else `rollout` would be the benchmark, not the package of tests
    patched.syspath_prepend(Path(__file__).resolve().parents[3] / "benchmarks")
    from reshard_plan import moves_of, rounds_of

SHAPES = {"q": (16, 8), "o": (8, 16), "norm": (8,), "scale": (), "odd": (7, 5)}
SPLITS = {  # name -> axis under tensor parallelism
    "q": 0,
    "o": 1,
    "odd": 0,
}


def layout(fsdp: int = 1, tp: int = 1, pp: int = 1, dp: int = 1) -> Layout:
    """A layout over all of these dimensions; tensors in turn on the stages, whole over `dp`."""
    mesh = Mesh((("pp", pp), ("dp", dp), ("fsdp", fsdp), ("tp", tp)))
    tensors = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        splits = [("tp", SPLITS[name])] if name in SPLITS else []
        splits += [("fsdp", 0)] if shape else []
        tensors[name] = TensorLayout(shape, tuple(splits), stage=index % pp if pp > 1 else None)
    return Layout(mesh, tensors)


ALL = [
    layout(fsdp=4),
    layout(tp=4),
    layout(dp=4),
    layout(pp=2, tp=2),
    layout(pp=2, fsdp=2),
    layout(fsdp=2, tp=2),
    layout(dp=2, tp=2),
    layout(dp=2, fsdp=2),
    layout(pp=4),
]


def slices(box):
    return tuple(slice(start, stop) for start, stop in box)


def carried_out(plan: Plan, limit_bytes: int) -> None:
    """Do what the plan says on real tensors, rank by rank, and look whether each holds what it wants."""
    source, target = plan.source, plan.target
    whole = {name: torch.arange(max(1, torch.Size(s).numel())).reshape(s) for name, s in SHAPES.items()}
    for name, tensor in whole.items():
        missing = torch.full_like(tensor, -1)
        held = []
        for rank in range(source.mesh.size):
            mine = missing.clone()
            if (box := source.holds(rank, name)) is not None:
                mine[slices(box)] = tensor[slices(box)]
            held.append(mine)
        for move in itertools.chain(*rounds_of(plan, limit_bytes)):
            if move.name == name:
                part = held[move.source][slices(move.box)]
                assert (part >= 0).all(), "it was sent by a rank that does not hold it"
                held[move.target][slices(move.box)] = part
        for rank in range(target.mesh.size):
            if (box := target.holds(rank, name)) is not None:
                assert torch.equal(held[rank][slices(box)], tensor[slices(box)])


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ALL, ALL)))
def test_every_pair_of_layouts_ends_right_and_moves_the_least(source, target):
    made = reshard_plan(source, target)
    carried_out(made, limit_bytes=40)
    assert made.num_bytes == lower_bound(source, target) == sum(move.num_bytes for move in moves_of(made))


def tensor_parallel(dims, shape=(16, 8)) -> Layout:
    return Layout(Mesh(dims), {"w": TensorLayout(shape, (("tp", 0),))})


def test_of_tp4_fsdp2_to_engines_of_four_a_seventh_of_gathering_travels():
    """Each device needs a quarter and holds half of it, so an eighth travels; gathering brings seven of them."""
    training = Layout(Mesh((("fsdp", 2), ("tp", 4))), {"w": TensorLayout((16, 8), (("tp", 0), ("fsdp", 0)))})
    made = reshard_plan(training, tensor_parallel((("dp", 2), ("tp", 4))))
    assert made.num_bytes * 7 == gathering_volume(training)
    assert [move.num_bytes for move in moves_of(made)] == [16 * 8 * 4 // 8] * len({m.target for m in moves_of(made)})


STAGES = Mesh((("pp", 2),))
NO_SOURCE = Layout(STAGES, {"w": TensorLayout((4,), stage=5)}), Layout(STAGES, {"w": TensorLayout((4,))})
TP_4 = (("tp", 4),)
test_what_cannot_be_planned_is_named = refused(
    ("4 ranks on one side and 2", 2, lambda: reshard_plan(layout(fsdp=4), layout(fsdp=2))),
    ("w", (8, 8), lambda: reshard_plan(tensor_parallel(TP_4), tensor_parallel(TP_4, (8, 8)))),
    ("rank 0", 0, lambda: reshard_plan(*NO_SOURCE)),
    ("a", "mesh", lambda: Mesh((("a", 2), ("a", 2)))),
    ("a", 0, lambda: Mesh((("a", 0),))),
    kind=ValueError,
)
