"""Weights on their way from the processes that hold them, divided, to those that feed an engine.

trainer's layout ──┐
                   ├── plan, made once ── bucket by bucket: own parts ── marks ── moves ──> slices that are wanted here
what engines take ─┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl.models.parallel_info import ParallelInfo
from verl.resharding.execute import LIMIT_BYTES, reshard
from verl.resharding.layout import Layout, TensorLayout
from verl.resharding.plan import Plan, gathering_volume, reshard_plan
from verl.rollout.vllm.told import Wanted
from verl.rollout.vllm.weights import Source
from verl.sync.own_parts import shard_of, upright
from verl.sync.shards import Shards
from verl.sync.vectors import Vectors


class Delivery:
    """What every sync moves, as long as the trainer's layout and the engines' wishes stay.

    Args:
        divided: how the model is spread.
        sources: its tensors in the order that they are to come in, the same on every rank.
        wants: of each rank, the slices that it is to feed into an engine; a name that is not there: nothing of it.
        dtype: that the engines compute in; tensors are cast to it before they travel.
        sideways: names of matrices that the model keeps as [in, out].
    Attributes:
        plan: of all moves.
        gathering_bytes: that would travel if every process gathered every tensor.
    """

    def __init__(
        self,
        divided: ParallelInfo,
        sources: Sequence[Source],
        wants: Sequence[Wanted],
        dtype: torch.dtype,
        sideways: set[str],
        limit_bytes: int = LIMIT_BYTES,
    ):
        self.divided, self.dtype, self._sideways, self._limit = divided, dtype, sideways, limit_bytes
        held = {s.name: replace(divided.layout_of(s.tensor), itemsize=dtype.itemsize) for s in sources}
        wanted = {
            name: TensorLayout(x.shape, itemsize=x.itemsize, boxes=tuple(own.get(name) for own in wants))
            for name, x in held.items()
        }
        self.plan = reshard_plan(Layout(divided.mesh, held), Layout(divided.mesh, wanted))
        self.gathering_bytes = gathering_volume(self.plan.source)
        self._buckets = list(_buckets(self.plan, limit_bytes))
        self._marked = {name for name in held if self._is_first_holder(name)}

    def tensors(self, sources: Mapping[str, Source], under_way: UnderWay) -> Iterator[tuple[str, Tensor]]:
        """What this rank feeds into an engine, in the order of the sources. All ranks take part, to the end.

        Beside what is yielded, a rank needs memory for one bucket: for its own parts that are cast or merged, and for
        what arrives.
        """
        device, rank = self.divided.device, self.divided.rank
        for bucket in self._buckets:
            held = {}
            for name in bucket.source.tensors:
                own = self.divided.local(sources[name].present()).to(device, self.dtype)  # all ranks, in one order
                if bucket.source.holds(rank, name) is not None:
                    held[name] = own
            self._mark(held, under_way)
            yield from reshard(
                bucket,
                held,
                rank,
                dtypes=dict.fromkeys(bucket.source.tensors, self.dtype),
                device=device,
                limit_bytes=self._limit,
                lend=True,
                received=under_way.count,
            )

    def _mark(self, held: Mapping[str, Tensor], under_way: UnderWay) -> None:
        """Take the marks of this rank's parts, as far as no rank before it has the same."""
        began = time.perf_counter()
        for name in held.keys() & self._marked:
            layout = self.plan.source.tensors[name]
            if len(layout.shape) > 2 or not under_way.marks(name):
                continue
            box = layout.box(self.divided.mesh, self.divided.rank)
            assert box is not None
            part, shape = held[name], layout.shape
            if name in self._sideways:
                part, box, shape = upright(part, box, shape)
            under_way.shards[name] = [shard_of(part, box, shape, under_way.vectors, self.dtype)]
        under_way.marking_s += time.perf_counter() - began

    def _is_first_holder(self, name: str) -> bool:
        own = self.plan.source.holds(self.divided.rank, name)
        return own is not None and all(self.plan.source.holds(r, name) != own for r in range(self.divided.rank))


class UnderWay:
    """One sync, as this process sees it.

    Args:
        vectors: of the proof.
        marks: whether the mark of a tensor is to be taken of its parts.
    Attributes:
        shards: of the marks, that this process took of its own parts.
        received: bytes of weights that came here from other processes.
        marking_s: seconds spent on marks.
    """

    def __init__(self, vectors: Vectors, marks: Callable[[str], bool]):
        self.vectors, self.marks = vectors, marks
        self.shards: Shards = {}
        self.received = 0
        self.marking_s = 0.0

    def count(self, num_bytes: int) -> None:
        """So much has arrived."""
        self.received += num_bytes


def _buckets(whole: Plan, limit_bytes: int) -> Iterator[Plan]:
    """The plan in parts, each of the next tensors up to the limit, or of one that is larger."""
    names: list[str] = []
    size = 0
    for name, layout in whole.source.tensors.items():
        num_bytes = layout.itemsize * _numel(layout.shape)
        if names and size + num_bytes > limit_bytes:
            yield _part(whole, names)
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield _part(whole, names)


def _part(whole: Plan, names: Sequence[str]) -> Plan:
    source, target = (
        Layout(side.mesh, {name: side.tensors[name] for name in names}) for side in (whole.source, whole.target)
    )
    return Plan(source, target, tuple(move for move in whole.moves if move.name in source.tensors))


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
