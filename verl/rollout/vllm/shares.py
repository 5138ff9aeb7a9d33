"""Which process feeds what to which worker of an engine: one of them all of it, or siblings a slice each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from verl.resharding.layout import Box
from verl.rollout.vllm.feeds import Plan, Slice, plan
from verl.rollout.vllm.leading import Offer
from verl.rollout.vllm.told import Wanted
from verl.rollout.vllm.weights import Weight


@dataclass(frozen=True)
class Share:
    """What one process feeds to an engine.

    Attributes:
        wanted: of each tensor of the running model, the slice that it needs for that.
        readers: the workers that read its stream.
        chunks: of the stream; none where it feeds nothing.
        chunk_bytes: of the largest chunk.
        slices: the tensors that do not come whole.
    """

    wanted: Wanted
    readers: tuple[int, ...]
    chunks: Plan
    chunk_bytes: int
    slices: dict[str, Slice]


@dataclass(frozen=True)
class _Sized:
    name: str
    shape: tuple[int, ...]


def may_be_sliced(weights: Iterable[Weight]) -> bool:
    """Whether what is sent are the tensors of the running model, vectors and matrices, one by one."""
    return all(weight.form is None and len(weight.shape) <= 2 for weight in weights)


def shares_of(
    offer: Offer, weights: Sequence[Weight], num_siblings: int, dtype: torch.dtype, chunk_bytes: int
) -> list[Share]:
    """The shares of siblings, in their order."""
    if offer.wants is None:
        wanted = {w.source.name: _all_of(w.source.tensor.shape) for w in weights}
        chunks, largest = plan(weights, dtype, chunk_bytes)
        whole = Share(wanted, tuple(range(offer.num_workers)), chunks, largest, {})
        return [whole, *(Share({}, (), [], 0, {}) for _ in range(num_siblings - 1))]
    readers = [_readers(place, num_siblings, offer.num_workers) for place in range(num_siblings)]
    return [_sliced([offer.wants[worker] for worker in own], own, weights, dtype, chunk_bytes) for own in readers]


def _sliced(
    wants: Sequence[Wanted], readers: tuple[int, ...], weights: Sequence[Weight], dtype: torch.dtype, chunk_bytes: int
) -> Share:
    if not readers:
        return Share({}, (), [], 0, {})
    wanted = {w.name: _hull([want[w.name] for want in wants if w.name in want]) for w in weights}
    coming = [_Sized(name, _shape(box)) for name, box in wanted.items() if all(_shape(box))]
    chunks, largest = plan(coming, dtype, chunk_bytes)
    slices = {
        w.name: Slice(tuple(w.shape), tuple(start for start, _ in wanted[w.name]))
        for w in weights
        if wanted[w.name] != _all_of(w.shape)
    }
    return Share(wanted, readers, chunks, largest, slices)


def _readers(place: int, num_siblings: int, num_workers: int) -> tuple[int, ...]:
    """The workers beside a sibling: one each for the first of them, or several for each of them."""
    if num_workers <= num_siblings:
        return (place,) if place < num_workers else ()
    return tuple(worker for worker in range(num_workers) if worker * num_siblings // num_workers == place)


def _hull(boxes: Sequence[Box]) -> Box:
    """The smallest slice that has all of these."""
    filled = [box for box in boxes if all(_shape(box))] or boxes[:1]
    return tuple((min(a for a, _ in sides), max(b for _, b in sides)) for sides in zip(*filled, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _all_of(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)
