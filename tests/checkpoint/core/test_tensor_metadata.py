"""Slices tile a tensor exactly, or the fault is named."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint.core.manifest import LogicalTensor, SavedSlice, join_tensors

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and extent


def tensor(shape: tuple[int, ...], *boxes: Box, dtype: str = "F32") -> LogicalTensor:
    slices = tuple(
        SavedSlice(file=f"f{n}", offset=0, start=start, extent=extent) for n, (start, extent) in enumerate(boxes)
    )
    return LogicalTensor(component="c", name="t", dtype=dtype, shape=shape, slices=slices)


FAULTY = {
    "a hole in the middle": (tensor((6,), ((0,), (2,)), ((4,), (2,))), r"2 of its 6 elements are in no slice"),
    "a missing corner": (tensor((2, 2), ((0, 0), (1, 2)), ((1, 0), (1, 1))), r"1 of its 4 elements"),
    "no dimensions, no slice": (tensor(()), r"1 of its 1 elements"),
    "no dimensions, twice": (tensor((), ((), ()), ((), ())), r"overlap"),
    "an overlap": (tensor((6,), ((0,), (4,)), ((3,), (3,))), r"slice \[0:4\] of f0 and slice \[3:6\] of f1 overlap"),
    "an overlap that hides a hole": (tensor((6,), ((0,), (3,)), ((0,), (3,))), r"overlap"),
    "beyond the end": (tensor((6,), ((0,), (7,))), r"\[0:7\] of f0 does not lie within the shape \[6\]"),
    "another number of dimensions": (tensor((6,), ((0, 0), (6, 1))), r"does not lie within"),
    "an unknown type": (tensor((6,), ((0,), (6,)), dtype="float32"), r"dtype 'float32' is not one of BOOL"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_what_does_not_tile_is_named(kind):
    faulty, problem = FAULTY[kind]
    with pytest.raises(AssertionError, match=problem):
        assert faulty.faults() == [], "; ".join(faulty.faults())


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    found = []
    for _ in range(draw(st.integers(0, 4))):
        start = tuple(draw(st.integers(0, size)) for size in shape)
        found.append((start, tuple(draw(st.integers(0, size - first)) for first, size in zip(start, shape))))
    return shape, found


@given(boxes())
@settings(max_examples=300, deadline=None)
def test_the_verdict_is_that_of_counting_every_element(case):
    shape, found = case
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for start, extent in found:
        for index in itertools.product(*(range(a, a + n) for a, n in zip(start, extent))):
            counts[index] += 1
    assert (tensor(shape, *found).faults() == []) == all(count == 1 for count in counts.values())


def test_what_several_writers_hold_is_joined_in_order_of_name():
    def half(name: str, rank: int, shape: tuple[int, ...] = (4,)) -> LogicalTensor:
        part = SavedSlice(file=f"rank_{rank}", offset=0, start=(2 * rank,), extent=(2,))
        return LogicalTensor(component="optimizer", name=name, dtype="F32", shape=shape, slices=(part,))

    joined, contradictions = join_tensors([half("b", 0), half("a", 1), half("b", 1), half("a", 0)])
    assert [tensor.name for tensor in joined] == ["a", "b"]
    assert [tensor.faults() for tensor in joined] == [[], []]
    assert contradictions == []
    _, contradictions = join_tensors([half("a", 0), half("a", 1, (5,))])
    assert contradictions == ["optimizer/a is F32[4] to one writer and F32[5] to another"]
