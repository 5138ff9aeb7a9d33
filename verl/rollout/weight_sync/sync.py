"""Weight syncs from a model to its engines; each byte is sent at most once.

offers (what engines take) ── plan, kept ── moves ── streams ── engines ── verification
                                              └── fingerprints, each rank of its own parts ──┘

`WeightSync` runs on every rank of the model, which may be the only one; `RankSync` is one rank's part of one sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verl.models.parallel_info import Autocast, ParallelInfo, meet
from verl.rollout.base import SyncResult
from verl.rollout.engine_process.process import EngineDied
from verl.rollout.generation_group import among_siblings, consensus
from verl.rollout.probe_log_probs import trainer_log_probs
from verl.rollout.proof.fingerprints import FingerprintShards, transposed_names
from verl.rollout.proof.verifier import VerificationResult, VerifyRequest
from verl.rollout.weight_sync.chunks import FeedPlan, SyncOffer, WantedSlices
from verl.rollout.weight_sync.engine_weights import MIB, EngineWeights
from verl.rollout.weight_sync.state_dict import NamedWeight, weights_of
from verl.rollout.weight_sync.stream import StreamBroken, StreamWriter
from verl.rollout.weight_sync.transfer import (
    FeedAssignment,
    TransferInProgress,
    WeightTransfer,
    assigned,
    formed,
    may_be_sliced,
    whole_adapter,
)
from verl.utils.memory import release_cached
from verl.utils.orphan_cleanup import process_fields
from verl.utils.progress import Progress, ProgressWatch
from verl.utils.threads import using_threads


@dataclass(frozen=True)
class RankSyncResult:
    """One rank's statistics of a sync.

    Attributes:
        received, fed: bytes of weights received from other processes, and sent to an engine.
        shards: fingerprints of its local parts.
        copying_s, loading_s, fingerprint_s: seconds for `sync/copy_s`, `sync/load_s` and fingerprints.
    """

    received: int
    fed: int
    shards: FingerprintShards
    copying_s: float
    loading_s: float
    fingerprint_s: float


@dataclass(frozen=True)
class RankConnection:
    """One rank's state that is kept between syncs during the lifetime of all engines.

    Attributes:
        key: identity of the engines and tensors.
        offer: of the engine of this process and its siblings.
        share: weights that this process feeds to the engine.
        stream: of this process, if it feeds an engine.
        feeds: plan of each worker of its engine.
    """

    key: tuple[Any, ...]
    offer: SyncOffer
    share: FeedAssignment
    transfer: WeightTransfer
    stream: StreamWriter | None
    feeds: list[FeedPlan]


@dataclass(frozen=True)
class RankSync:
    """One rank's part of one sync. All processes of the model run their parts at the same time.

    Args:
        engine: led by this process, if any.
        weights: of the model.
        question: of the verification of this sync.
    """

    model: Any
    engine: EngineWeights | None
    autocast: Autocast
    weights: Sequence[NamedWeight]
    question: VerifyRequest
    connection: RankConnection

    def move(self) -> RankSyncResult:
        """Send this process's parts to other ranks, and feed the engine.

        Raises:
            EngineDied, EngineError, StreamBroken: the engine failed. The other ranks still got their tensors.
        """
        connection, dtype = self.connection, self.connection.transfer.dtype
        transfer_state = TransferInProgress(self.question.vectors, lambda name: name in self._plain)
        tensors = self._formed(transfer_state)
        failure, copying, loading = None, 0.0, 0.0
        try:
            if self.engine is not None:
                self.engine.begin_load(connection.feeds, dtype)
            if connection.stream is not None:
                is_read = self._is_read if self.engine is None else self.engine.process.is_busy
                with self._threads():
                    copying = connection.stream.fill(connection.share.chunks, tensors, dtype, is_read, self._note)
        except (EngineDied, StreamBroken) as error:
            failure = error
        except BaseException:
            if connection.stream is not None:  # else its readers, and the engine's leader, would wait for ever
                connection.stream.abandon()
            if self.engine is not None:  # a late answer must not be read as that of the next call
                self.engine.process.kill()
            raise
        for _ in tensors:  # other processes need this one until the end
            pass
        if self.engine is not None and not isinstance(failure, EngineDied):
            loading = self.engine.end_load()  # raises the reason, if the stream is broken
        if failure is not None:
            raise failure
        transfer_state.copies.finish()
        fed = sum(torch.Size(place.shape).numel() for chunk in connection.share.chunks for place in chunk)
        copying -= min(copying, transfer_state.fingerprint_s)
        return RankSyncResult(
            transfer_state.received,
            fed * dtype.itemsize,
            transfer_state.shards,
            copying,
            loading,
            transfer_state.fingerprint_s,
        )

    def verify(self, moved: Sequence[RankSyncResult]) -> tuple[SyncResult | None, VerificationResult] | None:
        """Verify the engine against the weights of all processes, and against an adapter, which is sent before; None
        if this process leads no engine.

        Raises:
            WeightSyncError: the engine holds other weights.
        """
        sends_adapter = self.question.adapter_rank is not None
        whole = whole_adapter(self.model, self.connection.transfer.parallel_info) if sends_adapter else {}
        if self.engine is None:
            if self.question.rows:
                trainer_log_probs(self.model, self.question.rows, self.autocast)  # a forward pass needs all siblings
            return None
        failure, adapter = None, None
        try:
            self.engine.wake_cache()
            if sends_adapter:
                adapter = self.engine.send_adapter(whole)
            self.engine.request_fingerprints(self.question)
        except EngineDied as death:
            failure = death
        if self.question.rows:
            with self._threads():
                self.engine.verifier.compute_probe_log_probs()
        if failure is not None:
            raise failure
        seconds = max((one.fingerprint_s for one in moved), default=0.0)
        return adapter, self.engine.verify([one.shards for one in moved], seconds)

    def _formed(self, transfer_state: TransferInProgress) -> Iterator[tuple[str, Tensor]]:
        """The tensors for the engine, computed from tensors of the running model as they arrive."""
        share = self.connection.share
        coming = self.connection.transfer.tensors({w.source.name: w.source for w in self.weights}, transfer_state)
        names = {entry.name for chunk in share.chunks for entry in chunk}
        return formed([w for w in self.weights if w.source.name in share.wanted and w.name in names], coming)

    @cached_property
    def _plain(self) -> set[str]:
        """Tensors whose fingerprints are computed from their parts."""
        return {w.name for w in self.weights if w.form is None and len(w.shape) <= 2}

    def _note(self, name: str, tensor: Tensor) -> None:
        """Fingerprint of a tensor that is computed from a whole one."""
        if name not in self._plain and self.engine is not None:
            self.engine.verifier.add_fingerprint(name, tensor)

    def _is_read(self) -> bool:
        """Whether the engine of another process still reads, or will read, this process's stream."""
        assert self.connection.stream is not None
        state = process_fields(self.connection.offer.process_id)[:1]
        if self.connection.stream.is_abandoned or state in ([], ["Z"]):  # it has ended
            return False
        return self._watch is None or not self._watch.is_overdue

    @cached_property
    def _watch(self) -> ProgressWatch | None:
        """Progress watch of that engine; None if it cannot be watched from here."""
        try:
            progress = Progress.open(self.connection.offer.progress_path)
        except OSError:
            return None
        return ProgressWatch(progress, self.connection.offer.call_timeout_s)

    def _threads(self) -> AbstractContextManager[None]:
        return using_threads(self.connection.offer.num_threads)


class WeightSync:
    """The syncs of one model with its engines, seen from one of the processes that hold the model.

    A sync consists of `connect`, which fixes layouts and handles and is repeated only after an engine was restarted,
    `push` and `verify`.

    Args:
        parallel_info: layout of the model; siblings are the ranks that share an engine.
        engine: led by this process, if any.
        dtype: of computation in the engines.
        chunk_bytes: of a stream.
        may_slice: an engine may be fed by several processes.
        may_repeat: whether a failure of this process may be retried.
    """

    def __init__(
        self,
        model: Any,
        parallel_info: ParallelInfo,
        engine: EngineWeights | None,
        dtype: torch.dtype,
        autocast: Autocast,
        chunk_bytes: int,
        *,
        may_slice: bool,
        may_repeat: Callable[[Exception], bool],
    ):
        self.model, self.engine, self.dtype = model, engine, dtype
        self.autocast: Autocast = autocast
        self.parallel_info, self.chunk_bytes, self._may_repeat = parallel_info, chunk_bytes, may_repeat
        self._transposed = transposed_names(model)
        self._may_slice = may_slice
        self.stream: StreamWriter | None = None
        self._known: tuple[list[WantedSlices], WeightTransfer] | None = None
        self.connection: RankConnection | None = None

    def run(self, prepare: Callable[[], bool]) -> SyncResult:
        """Load the current weights into all engines and verify them.

        Args:
            prepare: see `EngineWeights.begin`.
        Raises:
            ConsensusFailed: that failed, here or elsewhere.
        """
        self._meet_without_cache()
        rounds = consensus(self.parallel_info, lambda: self._begin(prepare), self._may_repeat)
        leader = rounds[self.parallel_info.siblings[0]]
        assert leader is not None
        # Beside an engine that lacks the weights below an adapter, all others get them too: ranks send them together.
        sends_all = any(one[0].weights for one in rounds if one is not None)
        question = replace(leader[0], weights=sends_all)
        weights = list(weights_of(self.model, merge=question.adapter_rank is None))
        key = tuple(None if one is None else one[1] for one in rounds), tuple((w.name, w.shape) for w in weights)
        if self.connection is None or self.connection.key != key:
            self.connection = None
            self.connection = self.connect(key, weights)
        part = RankSync(self.model, self.engine, self.autocast, weights, question, self.connection)
        moved = self.push(part) if sends_all else []
        self._meet_without_cache()
        verified = self.verify(part, moved)[0]  # rank 0 leads an engine
        assert verified is not None
        adapter, result = verified
        synced = adapter or _synced(moved, self.connection.transfer, len(weights))
        return replace(synced, metrics=synced.metrics | result.metrics)

    def connect(self, key: tuple[Any, ...], weights: Sequence[NamedWeight]) -> RankConnection:
        """Agree on layouts and handles with engines that were restarted or changed their way of loading."""
        siblings = self.parallel_info.siblings
        offers = consensus(self.parallel_info, lambda: (siblings, self._offer(weights)), self._may_repeat)
        shares = assigned(offers, weights, self.dtype, self.chunk_bytes)
        (_, offer), transfer = offers[siblings[0]], self._transfer_plan([share.wanted for share in shares], weights)
        assert offer is not None
        stream, feeds = self._opened([shares[rank] for rank in siblings], offer)
        return RankConnection(key, offer, shares[self.parallel_info.rank], transfer, stream, feeds)

    def push(self, part: RankSync) -> list[RankSyncResult]:
        """Load the current weights into all engines."""
        return consensus(self.parallel_info, part.move, self._may_repeat)

    def verify(
        self, part: RankSync, moved: Sequence[RankSyncResult]
    ) -> list[tuple[SyncResult | None, VerificationResult] | None]:
        """Compare the weights of all engines with those of the processes."""
        return consensus(self.parallel_info, lambda: part.verify(moved), self._may_repeat)

    def close(self) -> None:
        """Free the memory of the stream."""
        self.connection = None
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _meet_without_cache(self) -> None:
        """Free torch's cached memory on all GPUs of an engine, before the engine allocates memory; collective."""
        release_cached(self.parallel_info.device)
        meet(self.parallel_info)

    def _begin(self, prepare: Callable[[], bool]) -> tuple[VerifyRequest, tuple[int, bool]] | None:
        """See `EngineWeights.begin`; readers may open this process's stream once all ranks have it."""
        round_ = None if self.engine is None else self.engine.begin(prepare)
        if self.connection is not None and self.connection.stream is not None:
            self.connection.stream.begin(len(self.connection.share.readers))
        return round_

    def _offer(self, weights: Sequence[NamedWeight]) -> SyncOffer | None:
        if self.engine is None:
            return None
        in_slices = len(self.parallel_info.siblings) > 1 and self._may_slice and may_be_sliced(weights)
        return self.engine.offer({w.name: tuple(w.shape) for w in weights} if in_slices else None)

    def _transfer_plan(self, wants: list[WantedSlices], weights: Sequence[NamedWeight]) -> WeightTransfer:
        """The transfer plan, created at the first sync and again if engines need other slices."""
        if self._known is None or self._known[0] != wants:
            sources = {w.source.name: w.source for w in weights}
            self._known = (
                wants,
                WeightTransfer(self.parallel_info, list(sources.values()), wants, self.dtype, self._transposed),
            )
        return self._known[1]

    def _opened(self, shares: Sequence[FeedAssignment], offer: SyncOffer) -> tuple[StreamWriter | None, list[FeedPlan]]:
        """This process's stream, if it feeds an engine; what each worker of its engine reads."""
        number = self.parallel_info.siblings.index(self.parallel_info.rank)
        share = shares[number]
        if share.chunks and (self.stream is None or self.stream.chunk_bytes < share.chunk_bytes):
            self.close()
            feeds_itself = share.readers == (number,)  # the worker on its GPU
            device = self.parallel_info.device if offer.reads_peers or feeds_itself else torch.device("cpu")
            self.stream = StreamWriter(share.chunk_bytes, offer.num_workers, device)
        stream = self.stream if share.chunks else None
        if stream is not None:
            stream.begin(len(share.readers))
        handles = among_siblings(self.parallel_info, None if stream is None else stream.handle)
        feeds = {
            worker: FeedPlan(handle, reader, share.chunks, share.slices)
            for share, handle in zip(shares, handles, strict=True)
            if handle is not None
            for reader, worker in enumerate(share.readers)
        }
        return stream, [feeds[worker] for worker in sorted(feeds)]


def _synced(moved: Sequence[RankSyncResult], transfer: WeightTransfer, num_tensors: int) -> SyncResult:
    """The result of all ranks."""
    traffic, fed = sum(result.received for result in moved), sum(result.fed for result in moved)
    assert traffic == transfer.plan.num_bytes, (traffic, transfer.plan.num_bytes)
    metrics = {"sync/copy_s": moved[0].copying_s, "sync/load_s": moved[0].loading_s, "sync/bytes": float(fed)}
    note = f"{num_tensors} tensors, {fed / MIB:.1f} MiB to the engine"
    if len(moved) == 1:
        return SyncResult(note, metrics)
    note += (
        f", {traffic / MIB:.1f} MiB between processes (to gather all of it everywhere: "
        f"{transfer.gathering_bytes / MIB:.1f})"
    )
    return SyncResult(note, metrics | {"sync/traffic_mib": traffic / MIB})
