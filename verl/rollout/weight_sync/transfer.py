"""Weight transfer between the ranks of a sharded model, from ranks that hold a tensor to ranks that feed an engine.

trainer's layout ──┐
                   ├── plan, made once ── per bucket: own parts ── fingerprints ── moves ──> slices wanted here
what engines take ─┘

`plan_feeds` decides which rank feeds which worker of an engine: one rank all of it, or each a slice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verl.models.hf_state_dict import live_tensors
from verl.models.parallel_info import Autocast, ParallelInfo, cast_together, parallel_info_of
from verl.ops.resharding.dtensor import is_on_other_stage
from verl.ops.resharding.execute import LIMIT_BYTES, reshard, reshard_plans
from verl.ops.resharding.layout import Box, Layout, TensorLayout, volume
from verl.ops.resharding.plan import Plan, gathering_volume, reshard_plan
from verl.rollout.engine_process.messages import EngineInfo
from verl.rollout.proof.fingerprints import (
    FingerprintParts,
    HostCopies,
    ProbeVectors,
    own_parts,
    transpose_to_out_in,
)
from verl.rollout.weight_sync.state_dict import NamedWeight, dtype_of, weights_of
from verl.rollout.weight_sync.stream import ChunkPlan, Feed, WantedSlices, plan_chunks

MIB = 1 << 20
CHUNKS = 8  # at least, of a stream


@dataclass
class RankTransfer:
    """The work of one rank in a sync.

    Attributes:
        received, fed: bytes of weights received from other processes, and sent to an engine.
        parts: fingerprints that it computed of its local parts.
        copying_s, loading_s, fingerprint_s: seconds for `sync/copy_s`, `sync/load_s` and fingerprints.
    """

    received: int = 0
    fed: int = 0
    parts: FingerprintParts = field(default_factory=dict)
    copying_s: float = 0.0
    loading_s: float = 0.0
    fingerprint_s: float = 0.0

    def count(self, num_bytes: int) -> None:
        """Add to the received bytes."""
        self.received += num_bytes


class WeightTransfer:
    """The transfers of every sync, for a fixed layout of the trainer and fixed slices of the engines.

    Args:
        parallel_info: layout of the model.
        weights: its tensors in the order of the transfer, the same on every rank.
        wants: for each rank, the slices that it feeds into an engine, by name in the running model.
        dtype: of computation in the engines; tensors are cast to it before they are sent.
        transposed: names of matrices that the model keeps as [in, out].
    Attributes:
        plan: of all transfers.
        gathering_bytes: bytes sent if every process gathered every tensor.
    """

    def __init__(
        self,
        parallel_info: ParallelInfo,
        weights: Sequence[NamedWeight],
        wants: Sequence[WantedSlices],
        dtype: torch.dtype,
        transposed: set[str],
        limit_bytes: int = LIMIT_BYTES,
    ):
        self.parallel_info, self.dtype, self._transposed, self._limit = parallel_info, dtype, transposed, limit_bytes
        sources = {w.source: w.tensor for w in weights}
        held = {name: replace(parallel_info.layout_of(x), itemsize=dtype.itemsize) for name, x in sources.items()}
        needed = {
            name: TensorLayout(x.shape, itemsize=x.itemsize, boxes=tuple(slices.get(name) for slices in wants))
            for name, x in held.items()
        }
        self.plan = reshard_plan(Layout(parallel_info.mesh, held), Layout(parallel_info.mesh, needed))
        self.gathering_bytes = gathering_volume(self.plan.source)
        self._buckets = list(buckets(self.plan, limit_bytes))
        plain = {w.source for w in weights if w.is_plain}
        self._fingerprinted = {name for name in plain if self._is_first_holder(name)}

    def tensors(
        self,
        weights: Sequence[NamedWeight],
        moved: RankTransfer,
        vectors: ProbeVectors | None,
        sent: Collection[str],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank feeds into an engine, in the order of the weights. Collective, until
        exhausted.

        While the tensors of a bucket are fed, the next bucket is cast, fingerprinted and sent. In addition to the
        yielded tensor, a rank needs memory for two buckets: its own parts after casting or merging, and the received
        parts.

        Args:
            vectors: of the proof; None: no fingerprints.
            sent: names of these tensors.
        """
        sources = {w.source: w for w in weights}
        coming = reshard_plans(
            self._held_buckets(sources, moved, vectors),
            self.parallel_info.rank,
            dtypes=dict.fromkeys(sources, self.dtype),
            device=self.parallel_info.device,
            limit_bytes=self._limit,
            lend=True,
            received=moved.count,
        )
        return formed([w for w in weights if w.name in sent], coming)

    def _held_buckets(
        self, sources: Mapping[str, NamedWeight], moved: RankTransfer, vectors: ProbeVectors | None
    ) -> Iterator[tuple[Plan, Mapping[str, Tensor]]]:
        """Each bucket, with this rank's parts of its tensors."""
        copies = HostCopies()
        for bucket in self._buckets:
            held = {}
            for name in bucket.source.tensors:
                if is_on_other_stage(sources[name].tensor):
                    continue
                present = sources[name].present()  # all ranks, in one order
                part = self.parallel_info.local(present).to(self.parallel_info.device)
                if bucket.source.holds(self.parallel_info.rank, name) is not None:
                    held[name] = part
            wide = {name: x for name, x in held.items() if x.dtype != self.dtype}
            held |= zip(wide, cast_together([*wide.values()], self.dtype), strict=True)
            if vectors is not None:
                self._take_fingerprints(held, moved, vectors, copies)
            yield bucket, held
        copies.finish()

    def _take_fingerprints(
        self, held: Mapping[str, Tensor], moved: RankTransfer, vectors: ProbeVectors, copies: HostCopies
    ) -> None:
        """Compute the fingerprints of this rank's parts, unless a lower rank holds the same part."""
        began, parts = time.perf_counter(), {}
        for name in held.keys() & self._fingerprinted:
            layout = self.plan.source.tensors[name]
            box = layout.box(self.parallel_info.mesh, self.parallel_info.rank)
            assert box is not None
            part, shape = held[name], layout.shape
            if name in self._transposed:
                part, box, shape = transpose_to_out_in(part, box, shape)
            parts[name] = part, box, shape
        with copies:
            marks = own_parts(parts, vectors, self.dtype)
        moved.parts |= {name: [mark] for name, mark in marks.items()}
        moved.fingerprint_s += time.perf_counter() - began

    def _is_first_holder(self, name: str) -> bool:
        source, rank = self.plan.source, self.parallel_info.rank
        layout = source.holds(rank, name)
        return layout is not None and all(source.holds(other, name) != layout for other in range(rank))


def formed(weights: Sequence[NamedWeight], coming: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint tensors, computed from tensors of the running model as they arrive.

    Args:
        weights: in the order of the tensors that come.
        coming: tensors of the running model, by name.
    """
    here: dict[str, Tensor] = {}
    last = {weight.source: number for number, weight in enumerate(weights)}
    for number, weight in enumerate(weights):
        source = weight.source
        while source not in here and weight.shape.numel():
            name, tensor = next(coming)
            here[name] = tensor
        whole = here[source] if source in here else weight.tensor.new_empty(weight.tensor.shape)
        yield weight.name, whole if weight.form is None else weight.form(whole)
        if last[source] == number:
            here.pop(source, None)
    for _ in coming:
        pass


class TransferToFirst:
    """Gathers the weights of a model in its first process, tensor by tensor, by a constant plan.

    Args:
        autocast: type of computation, to which they are cast before they are sent. Without one a model in one process
            keeps the type of each tensor, and a sharded one sends all in the type of the model.
    """

    def __init__(self, model: Any, autocast: Autocast):
        self.model, self.autocast, self.dtype = model, autocast, dtype_of(model, autocast)
        self._transfer: WeightTransfer | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every checkpoint tensor in the first process, none in others. Collective, until exhausted."""
        parallel_info, weights = parallel_info_of(self.model), list(weights_of(self.model))
        if parallel_info.mesh.size == 1:
            for weight in weights:
                tensor = weight.make().detach()
                is_cast = self.autocast is not None and tensor.is_floating_point()
                yield weight.name, tensor.to(self.dtype) if is_cast else tensor
            return
        if self._transfer is None:
            whole: WantedSlices = {w.source: _all_of(w.tensor.shape) for w in weights}
            wants = [whole if rank == 0 else {} for rank in range(parallel_info.mesh.size)]
            self._transfer = WeightTransfer(parallel_info, weights, wants, self.dtype, set())
        sent = {w.name for w in weights} if parallel_info.rank == 0 else ()
        yield from self._transfer.tensors(weights, RankTransfer(), None, sent)


def whole_adapter(model: Any, parallel_info: ParallelInfo) -> dict[str, Tensor]:
    """The full tensors of a LoRA adapter, by their names in the model, in every process. Collective."""
    tensors = live_tensors(model)
    if parallel_info.mesh.size == 1:
        return {name: x.detach() for name, x in tensors.items()}
    held = {name: parallel_info.layout_of(x) for name, x in tensors.items()}
    needed = {name: TensorLayout(x.shape, itemsize=x.itemsize) for name, x in held.items()}
    plan = reshard_plan(Layout(parallel_info.mesh, held), Layout(parallel_info.mesh, needed))
    dtypes, device = {name: x.dtype for name, x in tensors.items()}, parallel_info.device
    own = lambda name: parallel_info.local(tensors[name]).detach().to(device)  # noqa: E731
    return dict(reshard(plan, own, parallel_info.rank, dtypes=dtypes, device=device))


def buckets(whole: Plan, limit_bytes: int) -> Iterator[Plan]:
    """The plan in buckets: consecutive tensors of which no rank holds or needs more than the limit, or one larger
    tensor."""
    names: list[str] = []
    size = 0
    largest: dict[tuple[TensorLayout, TensorLayout], int] = {}  # bytes in one rank, by kind of tensor
    for name, layout in whole.source.tensors.items():
        kind = (layout, whole.target.tensors[name])
        if kind not in largest:
            pairs = ((whole.source.holds(r, name), whole.target.holds(r, name)) for r in range(whole.source.mesh.size))
            largest[kind] = layout.itemsize * max(sum(volume(box) for box in pair if box is not None) for pair in pairs)
        num_bytes = largest[kind]
        if names and size + num_bytes > limit_bytes:
            yield whole.restricted(names)
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield whole.restricted(names)


def plan_feeds(
    engines: Sequence[tuple[tuple[int, ...], EngineInfo | None]],
    weights: Sequence[NamedWeight],
    dtype: torch.dtype,
    chunk_bytes: int,
) -> list[Feed]:
    """The feed of each rank.

    Args:
        engines: of each rank, its siblings and the engine that it leads; None if it leads none.
    """
    feeds: dict[int, Feed] = {}
    for siblings, engine in engines:
        if engine is not None:
            feeds |= zip(siblings, _feeds_of(engine, weights, len(siblings), dtype, chunk_bytes), strict=True)
    return [feeds[rank] for rank in range(len(engines))]


def _feeds_of(
    engine: EngineInfo, weights: Sequence[NamedWeight], num_siblings: int, dtype: torch.dtype, chunk_bytes: int
) -> list[Feed]:
    """The feed of each sibling."""
    if engine.wants is None:
        wanted = {w.source: _all_of(w.tensor.shape) for w in weights}
        chunks, largest = _plan_stream({w.name: w.shape for w in weights}, dtype, chunk_bytes)
        return [Feed(wanted, tuple(range(engine.num_workers)), chunks, largest), *[Feed()] * (num_siblings - 1)]
    readers = [_readers(sibling, num_siblings, engine.num_workers) for sibling in range(num_siblings)]
    return [_sliced([engine.wants[i] for i in workers], workers, weights, dtype, chunk_bytes) for workers in readers]


def _sliced(
    wants: Sequence[WantedSlices],
    readers: tuple[int, ...],
    weights: Sequence[NamedWeight],
    dtype: torch.dtype,
    chunk_bytes: int,
) -> Feed:
    if not readers:
        return Feed()
    slices_of = {w.name: [want[w.name] for want in wants if w.name in want] for w in weights}  # of other stages, none
    wanted = {name: _bounding_slice(slices) for name, slices in slices_of.items() if slices}
    coming = {name: _shape(box) for name, box in wanted.items() if all(_shape(box))}
    chunks, largest = _plan_stream(coming, dtype, chunk_bytes)
    slices = {
        w.name: (tuple(w.shape), tuple(start for start, _ in wanted[w.name]))
        for w in weights
        if w.name in wanted and wanted[w.name] != _all_of(w.shape)
    }
    return Feed(wanted, readers, chunks, largest, slices)


def _plan_stream(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, chunk_bytes: int) -> tuple[ChunkPlan, int]:
    """`plan_chunks` with at least `CHUNKS` chunks except for tiny models, because an engine starts with the first
    chunk."""
    num_bytes = sum(map(math.prod, shapes.values())) * dtype.itemsize
    return plan_chunks(shapes, dtype, min(chunk_bytes, max(MIB, num_bytes // CHUNKS)))


def _readers(sibling: int, num_siblings: int, num_workers: int) -> tuple[int, ...]:
    """The workers that a sibling feeds."""
    if num_workers <= num_siblings:
        return (sibling,) if sibling < num_workers else ()
    return tuple(worker for worker in range(num_workers) if worker * num_siblings // num_workers == sibling)


def _bounding_slice(boxes: Sequence[Box]) -> Box:
    """The smallest slice that contains all of these."""
    filled = [box for box in boxes if all(_shape(box))] or boxes[:1]
    return tuple((min(a for a, _ in sides), max(b for _, b in sides)) for sides in zip(*filled, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _all_of(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)
