"""A sync of engines with a model that is divided over processes: every byte that has to move does so once.

offers (what engines take) ── plan, kept ── moves ── streams ── engines ── proof
                                              └── marks, each process of its own parts ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.models.parallel_info import Autocast
from verl.rollout.base import Synced
from verl.rollout.vllm.agreeing import agreed, among_siblings
from verl.rollout.vllm.delivery import Delivery
from verl.rollout.vllm.feeds import Feed
from verl.rollout.vllm.leading import LeadingEngine, Offer
from verl.rollout.vllm.shares import Share, may_be_sliced, shares_of
from verl.rollout.vllm.stream import Stream
from verl.rollout.vllm.sync_part import Moved, SyncPart
from verl.rollout.vllm.told import Wanted
from verl.rollout.vllm.weights import Weight, weights_of
from verl.sync.marks import sideways_names
from verl.sync.proof import Proof

MIB = 1 << 20


class PlannedSync:
    """The syncs of one model with its engines, as one of the processes that hold the model.

    Args:
        engine: that this process leads, if it leads one.
        dtype: that the engines compute in.
        chunk_bytes: of a stream.
        may_slice: an engine may be fed by several processes.
        may_repeat: whether a failure of this process may be mended by another try.
    """

    def __init__(
        self,
        model: Any,
        engine: LeadingEngine | None,
        dtype: torch.dtype,
        autocast: Autocast,
        chunk_bytes: int,
        *,
        may_slice: bool,
        may_repeat: Callable[[Exception], bool],
    ):
        self.model, self.engine, self.dtype, self.autocast = model, engine, dtype, autocast
        self.divided, self._chunk_bytes, self._may_repeat = model.divided, chunk_bytes, may_repeat
        self._sideways = sideways_names(model)
        self._may_slice = may_slice
        self._stream: Stream | None = None
        self._known: tuple[list[Wanted], Delivery] | None = None

    def run(self) -> Synced:
        """Bring the present weights into all engines, and prove them.

        Raises:
            Interrupted: that failed, here or elsewhere.
        """
        weights = list(weights_of(self.model))
        offers = agreed(self.divided, lambda: self._offer(weights), self._may_repeat)
        shares = self._shares(offers, weights)
        siblings = self.divided.siblings
        offer, delivery = offers[siblings[0]], self._delivery([share.wanted for share in shares], weights)
        assert offer is not None
        stream, feeds = self._opened([shares[rank] for rank in siblings], offer)
        part = SyncPart(
            self.model, self.engine, self.autocast, weights, offer, shares[self.divided.rank], delivery, stream, feeds
        )
        moved = agreed(self.divided, part.move, self._may_repeat)
        proofs = agreed(self.divided, lambda: part.prove(moved), self._may_repeat)
        return _synced(moved, delivery, len(weights), proofs[0])

    def close(self) -> None:
        """Give the memory of the stream back."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _offer(self, weights: Sequence[Weight]) -> Offer | None:
        if self.engine is None:
            return None
        in_slices = len(self.divided.siblings) > 1 and self._may_slice and may_be_sliced(weights)
        return self.engine.offer({w.name: tuple(w.shape) for w in weights} if in_slices else None)

    def _shares(self, offers: Sequence[Offer | None], weights: Sequence[Weight]) -> list[Share]:
        """Of all ranks: those of the siblings of a leader follow it."""
        shares: list[Share] = []
        for offer in offers:
            if offer is not None:
                shares += shares_of(offer, weights, len(self.divided.siblings), self.dtype, self._chunk_bytes)
        return shares

    def _delivery(self, wants: list[Wanted], weights: Sequence[Weight]) -> Delivery:
        """Made with the first sync, and again where other slices are wanted."""
        if self._known is None or self._known[0] != wants:
            sources = {w.source.name: w.source for w in weights}
            self._known = wants, Delivery(self.divided, list(sources.values()), wants, self.dtype, self._sideways)
        return self._known[1]

    def _opened(self, shares: Sequence[Share], offer: Offer) -> tuple[Stream | None, list[Feed]]:
        """This process's stream, if it feeds an engine, and what each worker of its engine reads."""
        mine = shares[self.divided.siblings.index(self.divided.rank)]
        if mine.chunks and (self._stream is None or self._stream.chunk_bytes < mine.chunk_bytes):
            self.close()
            self._stream = Stream(mine.chunk_bytes, offer.num_workers, self.divided.device)
        stream = self._stream if mine.chunks else None
        if stream is not None:
            stream.begin(len(mine.readers))
        handles = among_siblings(self.divided, None if stream is None else stream.handle)
        feeds = {
            worker: Feed(handle, number, share.chunks, share.slices)
            for share, handle in zip(shares, handles, strict=True)
            if handle is not None
            for number, worker in enumerate(share.readers)
        }
        return stream, [feeds[worker] for worker in sorted(feeds)]


def _synced(moved: Sequence[Moved], delivery: Delivery, num_tensors: int, proof: Proof | None) -> Synced:
    """What rank 0 has to tell, which leads an engine."""
    assert proof is not None
    traffic, fed = sum(one.received for one in moved), sum(one.fed for one in moved)
    assert traffic == delivery.plan.num_bytes, (traffic, delivery.plan.num_bytes)
    metrics = {
        "sync/copy_s": moved[0].copying_s,
        "sync/load_s": moved[0].loading_s,
        "sync/bytes": float(fed),
        "sync/traffic_mib": traffic / MIB,
    }
    note = (
        f"{num_tensors} tensors, {fed / MIB:.1f} MiB to vLLM, {traffic / MIB:.1f} MiB between processes "
        f"(to gather all of it everywhere: {delivery.gathering_bytes / MIB:.1f})"
    )
    return Synced(note, metrics | proof.metrics)
