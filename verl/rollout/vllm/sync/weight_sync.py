"""One weight sync from a sharded model to its engines: every byte that has to be moved is sent once.

offers (what engines take) ── plan, kept ── moves ── streams ── engines ── verification
                                              └── fingerprints, each rank of its own parts ──┘

`WeightSync` runs on every rank of the model; `RankSync` is one rank's part of one sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.models.parallel_info import Autocast, ParallelInfo, meet
from verl.rollout.base import SyncResult
from verl.rollout.consensus import among_siblings, consensus
from verl.rollout.vllm.client.client import GroupVLLMClient
from verl.rollout.vllm.client.engine_process import EngineDied
from verl.rollout.vllm.messages import FeedPlan, SyncOffer, SyncRound, WantedSlices
from verl.rollout.vllm.shm_stream import StreamBroken, StreamWriter, using_threads
from verl.rollout.vllm.state_dict import NamedWeight, weights_of
from verl.rollout.vllm.sync.weight_transfer import (
    FeedAssignment,
    TransferInProgress,
    WeightTransfer,
    assigned,
    formed,
    may_be_sliced,
)
from verl.rollout.weight_verification.fingerprint import FingerprintShards, transposed_names
from verl.rollout.weight_verification.logprob_probe import trainer_log_probs
from verl.rollout.weight_verification.verifier import VerificationResult, VerifyRequest
from verl.utils.memory import release_cached
from verl.utils.progress import Progress, ProgressWatch


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
class RankSync:
    """One rank's part of one sync. All processes of the model run their parts at the same time.

    Args:
        engine: that this process leads, if it leads one.
        weights: of the model.
        offer: of the engine of this process and its siblings.
        question: of the proof of this sync.
        share: that this process feeds to it, into `stream`.
        feeds: what each worker of the engine reads.
    """

    model: Any
    engine: GroupVLLMClient | None
    autocast: Autocast
    weights: Sequence[NamedWeight]
    offer: SyncOffer
    question: VerifyRequest
    share: FeedAssignment
    transfer: WeightTransfer
    stream: StreamWriter | None
    feeds: list[FeedPlan]

    def move(self) -> RankSyncResult:
        """Send this process's parts to other ranks, and feed the engine.

        Raises:
            EngineDied, EngineError, StreamBroken: the engine failed. The other ranks still got their tensors.
        """
        transfer_state = TransferInProgress(self.question.vectors, self._is_sent_as_it_is)
        tensors = self._formed(transfer_state)
        failure, copying, loading = None, 0.0, 0.0
        try:
            if self.engine is not None:
                self.engine.begin_load(self.feeds)
            if self.stream is not None:
                with self._threads():
                    copying = self._fill(self.stream, tensors)
        except (EngineDied, StreamBroken) as error:
            failure = error
        except BaseException:
            if self.stream is not None:  # or its readers would wait on, and the engine's leader for them
                self.stream.abandon()
            raise
        for _ in tensors:  # the other processes count on this one to the end
            pass
        if self.engine is not None and not isinstance(failure, EngineDied):
            loading = self.engine.end_load()  # tells why, if the stream is broken
        if failure is not None:
            raise failure
        transfer_state.copies.finish()
        fed = sum(torch.Size(place.shape).numel() for chunk in self.share.chunks for place in chunk)
        copying -= min(copying, transfer_state.fingerprint_s)
        size = fed * self.transfer.dtype.itemsize
        return RankSyncResult(
            transfer_state.received, size, transfer_state.shards, copying, loading, transfer_state.fingerprint_s
        )

    def verify(self, moved: Sequence[RankSyncResult]) -> VerificationResult | None:
        """Verify the engine against the weights of all processes; None if this process leads no engine.

        Raises:
            WeightSyncError: the engine holds other weights.
        """
        if self.engine is None:
            trainer_log_probs(self.model, self.question.rows, self.autocast)  # a forward pass needs all siblings
            return None
        failure = None
        try:
            self.engine.wake_cache()
            self.engine.request_fingerprints(self.question)
        except EngineDied as death:
            failure = death
        with self._threads():
            self.engine.compute_probe_log_probs()
        if failure is not None:
            raise failure
        return self.engine.verify_shards([one.shards for one in moved], max(one.fingerprint_s for one in moved))

    def _fill(self, stream: StreamWriter, tensors: Iterator[tuple[str, Tensor]]) -> float:
        if self.engine is not None:
            return stream.fill(self.share.chunks, tensors, self.transfer.dtype, self.engine.is_reading, self._note)
        return stream.fill(self.share.chunks, tensors, self.transfer.dtype, self._is_read)

    def _formed(self, transfer_state: TransferInProgress) -> Iterator[tuple[str, Tensor]]:
        """The tensors for the engine, computed from tensors of the running model as they arrive."""
        coming = self.transfer.tensors({w.source.name: w.source for w in self.weights}, transfer_state)
        there = {place.name for chunk in self.share.chunks for place in chunk}
        return formed([w for w in self.weights if w.source.name in self.share.wanted and w.name in there], coming)

    def _is_sent_as_it_is(self, name: str) -> bool:
        return name in self._plain

    @cached_property
    def _plain(self) -> set[str]:
        """Tensors whose fingerprints are computed from their parts."""
        return {w.name for w in self.weights if w.form is None and len(w.shape) <= 2}

    def _note(self, name: str, tensor: Tensor) -> None:
        """Fingerprint of a tensor that is computed from a whole one."""
        if name not in self._plain and self.engine is not None:
            self.engine.add_fingerprint(name, tensor)

    def _is_read(self) -> bool:
        """Whether the engine of another process still reads, or will read, this process's stream."""
        assert self.stream is not None
        if self.stream.is_abandoned or not _runs(self.offer.process_id):
            return False
        return self._watch is None or not self._watch.is_overdue

    @cached_property
    def _watch(self) -> ProgressWatch | None:
        """Watch on that engine; None where it cannot be watched from here."""
        try:
            progress = Progress.open(self.offer.progress_path)
        except OSError:
            return None
        return ProgressWatch(progress, self.offer.call_timeout_s)

    def _threads(self) -> AbstractContextManager[None]:
        return using_threads(self.offer.num_threads)


def _runs(process_id: int) -> bool:
    """Whether a process of this machine is running and is not a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


MIB = 1 << 20


@dataclass(frozen=True)
class _RankConnection:
    """One rank's state that is kept between syncs during the lifetime of all engines.

    Attributes:
        key: the engines, and the tensors, that it was made for.
        stream: of this process, if it feeds an engine, with so many readers.
        feeds: what each worker of its engine reads.
    """

    key: tuple[Any, ...]
    offer: SyncOffer
    share: FeedAssignment
    transfer: WeightTransfer
    stream: StreamWriter | None
    feeds: list[FeedPlan]
    num_readers: int


class WeightSync:
    """The syncs of one model with its engines, seen from one of the processes that hold the model.

    A sync consists of `connect`, which fixes layouts and handles and is repeated only after an engine was restarted,
    `push` and `verify`.

    Args:
        parallel_info: how the model is spread; siblings are the ranks that share an engine.
        engine: that this process leads, if it leads one.
        dtype: that the engines compute in.
        chunk_bytes: of a stream.
        may_slice: an engine may be fed by several processes.
        may_repeat: whether a failure of this process may be retried.
    """

    def __init__(
        self,
        model: Any,
        parallel_info: ParallelInfo,
        engine: GroupVLLMClient | None,
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
        self.connection: _RankConnection | None = None

    def run(self) -> SyncResult:
        """Load the current weights into all engines and verify them.

        Raises:
            ConsensusFailed: that failed, here or elsewhere.
        """
        weights = list(weights_of(self.model))
        self._meet_without_cache()
        rounds = consensus(self.parallel_info, self._begin, self._may_repeat)
        key = tuple(None if one is None else one.engine for one in rounds), tuple(w.name for w in weights)
        if self.connection is None or self.connection.key != key:
            self.connection = None
            self.connection = self.connect(key, weights)
        leader = rounds[self.parallel_info.siblings[0]]
        assert leader is not None
        made = self.connection
        part = RankSync(
            self.model, self.engine, self.autocast, weights, made.offer, leader.question, made.share, made.transfer,
            made.stream, made.feeds,
        )  # fmt: skip
        moved = self.push(part)
        self._meet_without_cache()
        proofs = self.verify(part, moved)
        return _synced(moved, made.transfer, len(weights), proofs[0])

    def connect(self, key: tuple[Any, ...], weights: Sequence[NamedWeight]) -> _RankConnection:
        """Agree on layouts and handles with engines that were restarted or changed their way of loading."""
        siblings = self.parallel_info.siblings
        offers = consensus(self.parallel_info, lambda: (siblings, self._offer(weights)), self._may_repeat)
        shares = assigned(offers, weights, self.dtype, self.chunk_bytes)
        (_, offer), transfer = offers[siblings[0]], self._transfer_plan([share.wanted for share in shares], weights)
        assert offer is not None
        stream, feeds, readers = self._opened([shares[rank] for rank in siblings], offer)
        return _RankConnection(key, offer, shares[self.parallel_info.rank], transfer, stream, feeds, readers)

    def push(self, part: RankSync) -> list[RankSyncResult]:
        """Load the current weights into all engines."""
        return consensus(self.parallel_info, part.move, self._may_repeat)

    def verify(self, part: RankSync, moved: Sequence[RankSyncResult]) -> list[VerificationResult | None]:
        """Compare the weights of all engines with those of the processes."""
        return consensus(self.parallel_info, lambda: part.verify(moved), self._may_repeat)

    def close(self) -> None:
        """Give the memory of the stream back."""
        self.connection = None
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _meet_without_cache(self) -> None:
        """Before an engine allocates memory, on all the GPUs that it spans: their ranks give back what torch keeps."""
        release_cached(self.parallel_info.device)
        meet(self.parallel_info)

    def _begin(self) -> SyncRound | None:
        """The siblings' information about this sync; readers may open this process's stream once all ranks have it."""
        found = None if self.engine is None else self.engine.begin_sync()
        if self.connection is not None and self.connection.stream is not None:
            self.connection.stream.begin(self.connection.num_readers)
        return found

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

    def _opened(
        self, shares: Sequence[FeedAssignment], offer: SyncOffer
    ) -> tuple[StreamWriter | None, list[FeedPlan], int]:
        """This process's stream, if it feeds an engine; what each worker of its engine reads; readers of the stream."""
        mine = shares[self.parallel_info.siblings.index(self.parallel_info.rank)]
        if mine.chunks and (self.stream is None or self.stream.chunk_bytes < mine.chunk_bytes):
            self.close()
            feeds_itself = mine.readers == (
                self.parallel_info.siblings.index(self.parallel_info.rank),
            )  # the worker on its GPU
            device = self.parallel_info.device if offer.reads_peers or feeds_itself else torch.device("cpu")
            self.stream = StreamWriter(mine.chunk_bytes, offer.num_workers, device)
        stream = self.stream if mine.chunks else None
        if stream is not None:
            stream.begin(len(mine.readers))
        handles = among_siblings(self.parallel_info, None if stream is None else stream.handle)
        feeds = {
            worker: FeedPlan(handle, number, share.chunks, share.slices)
            for share, handle in zip(shares, handles, strict=True)
            if handle is not None
            for number, worker in enumerate(share.readers)
        }
        return stream, [feeds[worker] for worker in sorted(feeds)], len(mine.readers)


def _synced(
    moved: Sequence[RankSyncResult], transfer: WeightTransfer, num_tensors: int, proof: VerificationResult | None
) -> SyncResult:
    """The result of rank 0, which leads an engine."""
    assert proof is not None
    traffic, fed = sum(one.received for one in moved), sum(one.fed for one in moved)
    assert traffic == transfer.plan.num_bytes, (traffic, transfer.plan.num_bytes)
    metrics = {
        "sync/copy_s": moved[0].copying_s,
        "sync/load_s": moved[0].loading_s,
        "sync/bytes": float(fed),
        "sync/traffic_mib": traffic / MIB,
    }
    note = (
        f"{num_tensors} tensors, {fed / MIB:.1f} MiB to vLLM, {traffic / MIB:.1f} MiB between processes "
        f"(to gather all of it everywhere: {transfer.gathering_bytes / MIB:.1f})"
    )
    return SyncResult(note, metrics | proof.metrics)
