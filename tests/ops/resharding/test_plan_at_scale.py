"""Plans of large models over many ranks, against a simple plan that goes tensor by tensor and rank by rank."""

from collections import Counter
from pathlib import Path

import pytest
from cases import short_where
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.ops.resharding.layout import Layout, Mesh, TensorLayout, difference, intersection, volume
from verl.ops.resharding.plan import lower_bound, reshard_plan

with pytest.MonkeyPatch.context() as patched:  # else `rollout` would be the benchmark, not the package of tests
    patched.syspath_prepend(Path(__file__).resolve().parents[3] / "benchmarks")
    import reshard_plan as benchmark

LIMIT = benchmark.LIMIT_BYTES


def simple_plan(source: Layout, target: Layout) -> tuple[set[tuple], Counter]:
    """What each rank is sent, by tensor and slice, and what each rank sends, if always the idlest holder does."""
    load, fetched = Counter(), set()
    for name, wanted in target.tensors.items():
        holders = {}
        for rank in range(source.mesh.size):
            if (box := source.holds(rank, name)) is not None:
                holders.setdefault(box, []).append(rank)
        for rank in range(target.mesh.size):
            box, own = target.holds(rank, name), source.holds(rank, name)
            for missing in [] if box is None else [box] if own is None else list(difference(box, own)):
                for held, ranks in holders.items():
                    if (part := intersection(missing, held)) is not None:
                        load[min(ranks, key=lambda r: (load[r], abs(r - rank), r))] += volume(part) * wanted.itemsize
                        fetched.add((name, part, rank))
    return fetched, load


@st.composite
def layouts(draw):
    """Two layouts of some layers that repeat, of tensors of any shape, over one number of ranks."""
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=4))
    repeats, sides = draw(st.integers(1, 3)), []
    for _ in range(2):
        sizes = draw(st.sampled_from([(1, 1, 8), (2, 2, 2), (1, 4, 2), (4, 1, 2), (8, 1, 1), (2, 4, 1), (1, 1, 8)]))
        mesh = Mesh(tuple(zip(("pp", "fsdp", "tp"), sizes, strict=True)))
        kinds = []
        for shape in shapes:
            axes = [draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None for _ in range(2)]
            kinds.append(tuple((dim, axis) for dim, axis in zip(("tp", "fsdp"), axes, strict=True) if axis is not None))
        tensors = {}
        for layer in range(repeats):
            stage = layer % sizes[0] if sizes[0] > 1 else None
            for kind, (shape, splits) in enumerate(zip(shapes, kinds, strict=True)):
                tensors[f"{layer}.{kind}"] = TensorLayout(shape, splits, stage, itemsize=2)
        sides.append(Layout(mesh, tensors))
    return sides


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(layouts(), st.sampled_from([2, 6, 50, 10_000]))
def test_a_plan_sends_what_the_simple_one_does_and_burdens_no_sender_much_more(pair, limit):
    source, target = pair
    made = reshard_plan(source, target)
    fetched, load = simple_plan(source, target)
    assert {(move.name, move.box, move.target) for move in benchmark.moves_of(made)} == fetched
    assert len(benchmark.moves_of(made)) == len(fetched)
    for move in benchmark.moves_of(made):
        assert intersection(move.box, source.holds(move.source, move.name)) == move.box
    assert made.num_bytes == lower_bound(source, target)
    largest = max((move.num_bytes for move in benchmark.moves_of(made)), default=0)
    assert benchmark.traffic(made)[0].max() <= 1.25 * max(load.values(), default=0) + largest
    in_rounds = Counter()
    for moves, most in zip(benchmark.rounds_of(made, limit), benchmark.round_bytes(made, limit), strict=True):
        sent, received = Counter(), Counter()
        for move in moves:
            sent[move.source] += move.num_bytes
            received[move.target] += move.num_bytes
            in_rounds[move.name, move.target] += move.num_bytes
            assert volume(move.box) * 2 == move.num_bytes
        assert max((*sent.values(), *received.values()), default=0) == most <= limit
    wanted = Counter()
    for name, box, rank in fetched:
        wanted[name, rank] += volume(box) * 2
    assert in_rounds == wanted
    part = list(target.tensors)[1:]
    assert {(m.name, m.box, m.source, m.target) for m in benchmark.moves_of(made.restricted(part))} == {
        (m.name, m.box, m.source, m.target) for m in benchmark.moves_of(made) if m.name in part
    }


@pytest.mark.parametrize("name", short_where(benchmark.pairs(64), next(iter(benchmark.pairs(64))).__eq__))
def test_a_70b_model_over_64_ranks_moves_the_least_in_nearly_the_least_time(name):
    source, target = benchmark.pairs(64)[name]
    made = reshard_plan(source, target)
    assert made.num_bytes == lower_bound(source, target)
    rounds = benchmark.round_bytes(made, LIMIT)
    assert max(rounds) <= LIMIT
    assert sum(rounds) <= 1.2 * benchmark.least_bytes(made)
    sent, _ = benchmark.traffic(made)  # what a rank receives, the layouts say
    assert sent.max() * 64 <= 1.2 * made.num_bytes


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("8B, 8 GPUs, fsdp, an engine in each", "13.1 | 13.1 | 15.0 | 285 | 5,782 | 291"),
        ("8B, 8 GPUs, fsdp, engines of 2", "7.2 | 7.2 | 7.5 | 145 | 3,214 | 291"),
    ],
)
def test_bytes_and_launches_of_a_sync_are_those_that_were_measured(name, figures):
    assert benchmark.sync_line(name) == f"| {name} | {figures} |"


def test_a_bucket_of_a_sync_holds_what_a_rank_has_memory_for():
    source, target = benchmark.SYNCS["70B, 64 GPUs, hsdp (8 a replica), engines of 8"]
    made = list(benchmark.buckets(reshard_plan(source, target), LIMIT))
    assert [name for bucket in made for name in bucket.source.tensors] == list(source.tensors)
    for bucket in made:
        sizes = [2 * volume(side.holds(0, x)) for side in (bucket.source, bucket.target) for x in side.tensors]
        assert sum(sizes) <= LIMIT or len(bucket.source.tensors) == 1
    assert len(made) < 0.8 * 2 * sum(volume([(0, n) for n in x.shape]) for x in source.tensors.values()) / (LIMIT * 4)


def test_receivers_of_large_slices_are_served_at_the_same_time():
    """Each of 8 ranks wants 7 slices of 16 KiB: with rounds of 4 KiB all of them receive in each round."""
    tensors = {"w": TensorLayout((8 * 64, 64), (("fsdp", 0),))}
    source, target = Layout(Mesh((("fsdp", 8),)), tensors), Layout(Mesh((("dp", 8),)), {"w": TensorLayout((512, 64))})
    made = reshard_plan(source, target)
    rounds = list(benchmark.rounds_of(made, 4096))
    assert sum(benchmark.round_bytes(made, 4096)) == benchmark.least_bytes(made) == 7 * 2**14
    assert all({move.target for move in moves} == set(range(8)) for moves in rounds)
    assert [len(moves) for moves in benchmark.rounds_of(made, 4096, rank=3)] == [14] * len(rounds)  # 7 sent, 7 received


def test_stages_of_a_pipeline_send_at_the_same_time():
    def layout(pp, tp):
        return Layout(
            Mesh((("pp", pp), ("tp", tp))),
            {str(n): TensorLayout((64, 64), (("tp", 0),), n // 4 if pp > 1 else None) for n in range(8)},
        )

    for source, target in ((layout(2, 2), layout(1, 4)), (layout(1, 4), layout(2, 2))):
        made = reshard_plan(source, target)
        assert sum(benchmark.round_bytes(made, 1 << 14)) <= 1.2 * benchmark.least_bytes(made)
