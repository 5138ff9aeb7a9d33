"""Weight syncs from a model to its engines; each byte is sent at most once.

connect   which process sends what to which worker of an engine, and the streams; again only for a new engine
push      own parts ── moves between processes ── streams ── engines
            └── fingerprints
verify    fingerprints of engines and processes are compared, and log-probs of the probe
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.models.parallel_info import Autocast, ParallelInfo, meet
from verl.rollout.base import SyncResult
from verl.rollout.engine_process.messages import EngineInfo
from verl.rollout.engine_process.process import EngineDied
from verl.rollout.generation_group import among_siblings, consensus
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof.fingerprints import transposed_names
from verl.rollout.proof.verifier import VerifyRequest
from verl.rollout.weight_sync.engine_weights import MIB, EngineWeights
from verl.rollout.weight_sync.state_dict import NamedWeight, weights_of
from verl.rollout.weight_sync.stream import Feed, StreamBroken, StreamWriter, WantedSlices
from verl.rollout.weight_sync.transfer import RankTransfer, WeightTransfer, plan_feeds, whole_adapter
from verl.utils.memory import release_cached
from verl.utils.orphan_cleanup import process_fields
from verl.utils.progress import Progress, ProgressWatch
from verl.utils.threads import using_threads

T = TypeVar("T")


class WeightSync:
    """The syncs of one model with its engines, seen from one of the processes that hold the model.

    Each process calls `connect`, `push` and `verify` for its own part, and all agree whether they succeeded.

    Args:
        parallel_info: layout of the model; siblings are the ranks that share an engine.
        engine: led by this process, if any.
        dtype: of computation in the engines.
        chunk_bytes: of a stream.
        may_slice: an engine may be fed by several processes.
        may_repeat: whether a failure of this process may be retried.
    Attributes, after `connect`:
        info: of the engine of this process and its siblings.
        feed: what this process sends to it.
        feeds: what all siblings send to it.
        transfer: between processes.
        stream: of this process, kept where it feeds nothing for the moment.
        connection_key: the engines and tensors that are connected; None before.
    """

    info: EngineInfo
    feed: Feed
    feeds: list[Feed]
    transfer: WeightTransfer

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
        self._wants: list[WantedSlices] | None = None  # that `transfer` is for
        self.connection_key: Any = None

    def run(self, prepare: Callable[[], bool]) -> SyncResult:
        """Load the current weights into all engines and verify them.

        Args:
            prepare: see `EngineWeights.begin`.
        Raises:
            ConsensusFailed: that failed, here or elsewhere.
        """
        self._meet_without_cache()
        rounds = self._agree(lambda: self._begin(prepare))
        leader = rounds[self.parallel_info.siblings[0]]
        assert leader is not None
        # Beside an engine that lacks the weights below an adapter, all others get them too: ranks send them together.
        sends_all = any(one[0].weights for one in rounds if one is not None)
        question = replace(leader[0], weights=sends_all)
        weights = list(weights_of(self.model, merge=question.adapter_rank is None))
        key = tuple(None if one is None else one[1] for one in rounds), tuple((w.name, w.shape) for w in weights)
        if self.connection_key != key:
            self.connection_key = None
            self.connect(weights)
            self.connection_key = key
        moved = self._agree(lambda: self.push(weights, question)) if sends_all else []
        self._meet_without_cache()
        synced = self._agree(lambda: self.verify(question, moved, len(weights)))[0]
        assert synced is not None  # rank 0 leads an engine
        return synced

    def connect(self, weights: Sequence[NamedWeight]) -> None:
        """Agree on layouts and handles with engines that were restarted or changed their way of loading."""
        siblings = self.parallel_info.siblings
        engines = self._agree(lambda: (siblings, self._engine_info(weights)))
        info = engines[siblings[0]][1]
        assert info is not None
        plans = plan_feeds(engines, weights, self.dtype, self.chunk_bytes)
        if self._wants != (wants := [plan.wanted for plan in plans]):
            self.transfer = WeightTransfer(self.parallel_info, weights, wants, self.dtype, self._transposed)
            self._wants = wants
        self.info, self.feed = info, plans[self.parallel_info.rank]
        handles = among_siblings(self.parallel_info, self._opened_stream().handle if self.feed.chunks else None)
        pairs = zip((plans[rank] for rank in siblings), handles, strict=True)
        self.feeds = [replace(plan, handle=handle) for plan, handle in pairs if handle is not None]

    def push(self, weights: Sequence[NamedWeight], question: VerifyRequest) -> RankTransfer:
        """Send this process's parts to the others, and feed the engine.

        Raises:
            EngineDied, EngineError, StreamBroken: the engine failed. The other ranks still got their tensors.
        """
        moved, stream = RankTransfer(), self.stream if self.feed.chunks else None
        sent = {entry.name for chunk in self.feed.chunks for entry in chunk}
        tensors = self.transfer.tensors(weights, moved, question.vectors, sent)
        plain = {w.name for w in weights if w.is_plain}

        def note(name: str, tensor: Tensor) -> None:
            if name not in plain and self.engine is not None:  # others have fingerprints of their parts
                self.engine.verifier.add_fingerprint(name, tensor)

        failure = None
        try:
            if self.engine is not None:
                self.engine.begin_load(self.feeds, self.dtype)
            if stream is not None:
                is_read = self._is_read_elsewhere() if self.engine is None else self.engine.process.is_busy
                with self._threads():
                    moved.copying_s = stream.fill(self.feed.chunks, tensors, self.dtype, is_read, note)
        except (EngineDied, StreamBroken) as error:
            failure = error
        except BaseException:
            if stream is not None:  # else its readers, and the engine's leader, would wait for ever
                stream.abandon()
            if self.engine is not None:  # a late answer must not be read as that of the next call
                self.engine.process.kill()
            raise
        for _ in tensors:  # other processes need this one until the end
            pass
        if self.engine is not None and not isinstance(failure, EngineDied):
            moved.loading_s = self.engine.end_load()  # raises the reason, if the stream is broken
        if failure is not None:
            raise failure
        moved.fed = sum(prod(entry.shape) for chunk in self.feed.chunks for entry in chunk) * self.dtype.itemsize
        moved.copying_s -= min(moved.copying_s, moved.fingerprint_s)
        return moved

    def verify(self, question: VerifyRequest, moved: Sequence[RankTransfer], num_tensors: int) -> SyncResult | None:
        """Verify the engine against the weights of all processes, and against an adapter, which is sent before; None
        if this process leads no engine.

        Raises:
            WeightSyncError: the engine holds other weights.
        """
        adapter = {} if question.adapter_rank is None else whole_adapter(self.model, self.parallel_info)
        if self.engine is None:
            if question.rows:
                trainer_log_probs(self.model, question.rows, self.autocast)  # a forward pass needs all siblings
            return None
        failure, synced = None, None
        try:
            synced = self.engine.begin_verify(question, adapter)
        except EngineDied as death:
            failure = death
        if question.rows:
            with self._threads():
                self.engine.verifier.compute_probe_log_probs()
        if failure is not None:
            raise failure
        seconds = max((one.fingerprint_s for one in moved), default=0.0)
        metrics = self.engine.end_verify([one.parts for one in moved], seconds)
        synced = synced or _synced(moved, self.transfer, num_tensors)
        return replace(synced, metrics=synced.metrics | metrics)

    def close(self) -> None:
        """Free the memory of the stream."""
        self.connection_key = None
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _agree(self, part: Callable[[], T]) -> list[T]:
        """The results of a part of the sync in all processes; all of them fail if one does."""
        return consensus(self.parallel_info, part, self._may_repeat)

    def _meet_without_cache(self) -> None:
        """Free torch's cached memory on all GPUs of an engine, before the engine allocates memory; collective."""
        release_cached(self.parallel_info.device)
        meet(self.parallel_info)

    def _begin(self, prepare: Callable[[], bool]) -> tuple[VerifyRequest, tuple[int, bool]] | None:
        """See `EngineWeights.begin`; readers may open this process's stream once all ranks have it."""
        round_ = None if self.engine is None else self.engine.begin(prepare)
        if self.connection_key is not None and self.stream is not None:
            self.stream.begin(len(self.feed.readers))
        return round_

    def _engine_info(self, weights: Sequence[NamedWeight]) -> EngineInfo | None:
        if self.engine is None:
            return None
        has_siblings = len(self.parallel_info.siblings) > 1
        in_slices = has_siblings and self._may_slice and all(w.is_plain for w in weights)
        return self.engine.describe({w.name: tuple(w.shape) for w in weights} if in_slices else None)

    def _opened_stream(self) -> StreamWriter:
        """This process's stream, large enough for its feed."""
        if self.stream is None or self.stream.chunk_bytes < self.feed.chunk_bytes:
            self.close()
            feeds_own_gpu = self.feed.readers == (self.parallel_info.siblings.index(self.parallel_info.rank),)
            on_gpu = self.info.reads_peers or feeds_own_gpu
            device = self.parallel_info.device if on_gpu else torch.device("cpu")
            self.stream = StreamWriter(self.feed.chunk_bytes, self.info.num_workers, device)
        self.stream.begin(len(self.feed.readers))
        return self.stream

    def _is_read_elsewhere(self) -> Callable[[], bool]:
        """A function that tells whether the engine of another process still reads, or will read, this one's stream."""
        assert self.stream is not None
        stream, info, watch = self.stream, self.info, None
        with contextlib.suppress(OSError):  # else it cannot be watched from here
            watch = ProgressWatch(Progress.open(info.progress_path), info.call_timeout_s)

        def is_read() -> bool:
            has_ended = process_fields(info.process_id)[:1] in ([], ["Z"])
            return not (stream.is_abandoned or has_ended or (watch is not None and watch.is_overdue))

        return is_read

    def _threads(self) -> AbstractContextManager[None]:
        return using_threads(self.info.num_threads)


def _synced(moved: Sequence[RankTransfer], transfer: WeightTransfer, num_tensors: int) -> SyncResult:
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
