"""Plans carried out by four processes over gloo."""

import multiprocessing
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from verl.ops.resharding.execute import reshard, reshard_plans
from verl.ops.resharding.layout import Box, Layout, Mesh, TensorLayout
from verl.ops.resharding.plan import lower_bound, reshard_plan

SHAPES = {"q": (16, 6), "o": (6, 16), "norm": (6,), "scale": (), "odd": (7, 5)}
TP_AXIS = {"q": 0, "o": 1, "odd": 0}
RANKS = 4


def layout(*dims: tuple[str, int]) -> Layout:
    sizes = dict(dims)
    tensors = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        splits = [("tp", TP_AXIS[name])] if name in TP_AXIS and "tp" in sizes else []
        splits += [("fsdp", 0)] if shape and "fsdp" in sizes else []
        tensors[name] = TensorLayout(shape, tuple(splits), index % sizes["pp"] if "pp" in sizes else None)
    return Layout(Mesh(dims), tensors)


LAYOUTS = [
    layout(("fsdp", 4)),
    layout(("tp", 4)),
    layout(("dp", 2), ("tp", 2)),
    layout(("fsdp", 2), ("tp", 2)),
    layout(("pp", 2), ("tp", 2)),
    layout(("dp", 4)),
]


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def cut(name: str, box: Box) -> torch.Tensor:
    return whole(name)[tuple(slice(start, stop) for start, stop in box)]


def every_pair(rank: int, rendezvous: str, answers) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
        )
        dtypes = dict.fromkeys(SHAPES, torch.float32)
        checked = 0
        for source in LAYOUTS:
            boxes = {name: source.holds(rank, name) for name in SHAPES}
            held = {name: cut(name, box) for name, box in boxes.items() if box is not None}
            for target in LAYOUTS:
                made = reshard_plan(source, target)
                assert made.num_bytes == lower_bound(source, target)
                got = dict(reshard(made, held, rank, dtypes=dtypes, limit_bytes=100))
                expected = {name: target.holds(rank, name) for name in SHAPES}
                assert [name for name, box in expected.items() if box is not None] == list(got)
                for name, tensor in got.items():
                    assert torch.equal(tensor, cut(name, expected[name])), (name, source, target)
                    checked += 1
        assert order_of_rounds_and_tensors(rank, dtypes) == ["round", "round", "tensor", "tensor"]
        dist.destroy_process_group()
        answers.put(checked)
    except BaseException:  # noqa: BLE001 - told to the parent
        answers.put(traceback.format_exc())


def order_of_rounds_and_tensors(rank: int, dtypes: dict[str, torch.dtype]) -> list[str]:
    """A plan in parts of one tensor each, all of which every rank receives something of."""
    source, target = layout(("fsdp", 4)), layout(("dp", 4))
    plan = reshard_plan(source, target)
    names = ["q", "odd"]
    held = {name: cut(name, box) for name in names if (box := source.holds(rank, name)) is not None}
    order: list[str] = []
    start = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: order.append("round") or start(ops)
    try:
        for name, tensor in reshard_plans([(plan.restricted([name]), held) for name in names], rank, dtypes=dtypes):
            assert torch.equal(tensor, whole(name))
            order.append("tensor")
    finally:
        dist.batch_isend_irecv = start
    return order


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_four_processes_end_with_what_every_pair_of_layouts_asks_for(tmp_path):
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    workers = [
        fork.Process(target=every_pair, args=(rank, str(tmp_path / "rendezvous"), answers)) for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert all(isinstance(count, int) and count > 100 for count in found), found
