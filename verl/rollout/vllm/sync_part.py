"""One process's part of one sync: what it holds goes to who wants it, what it feeds goes into its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.models.parallel_info import Autocast
from verl.rollout.vllm.delivery import Delivery, UnderWay
from verl.rollout.vllm.feeds import Feed
from verl.rollout.vllm.leading import LeadingEngine, Offer
from verl.rollout.vllm.process import EngineDied
from verl.rollout.vllm.shares import Share
from verl.rollout.vllm.stream import Stream, StreamBroken, using_threads
from verl.rollout.vllm.weights import Weight
from verl.sync.probe import trainer_log_probs
from verl.sync.proof import Proof
from verl.sync.shards import Shards
from verl.utils.progress import Progress, ProgressWatch


@dataclass(frozen=True)
class Moved:
    """What one process did of a sync.

    Attributes:
        received, fed: bytes of weights that came from other processes, and that went to an engine.
        shards: of marks, of its own parts.
        copying_s, loading_s, marking_s: of what `sync/copy_s` and `sync/load_s` tell, and of marks.
    """

    received: int
    fed: int
    shards: Shards
    copying_s: float
    loading_s: float
    marking_s: float


@dataclass(frozen=True)
class SyncPart:
    """What one process has to do of one sync. All processes of the model do their parts at the same time.

    Args:
        engine: that this process leads, if it leads one.
        weights: of the model.
        offer: of the engine of this process and its siblings.
        share: that this process feeds to it, into `stream`.
        feeds: what each worker of the engine reads.
    """

    model: Any
    engine: LeadingEngine | None
    autocast: Autocast
    weights: Sequence[Weight]
    offer: Offer
    share: Share
    delivery: Delivery
    stream: Stream | None
    feeds: list[Feed]

    def move(self) -> Moved:
        """Give what this process holds, and feed what it is to feed.

        Raises:
            EngineDied, EngineError, StreamBroken: the engine does not take it. The others have got theirs all the same.
        """
        under_way = UnderWay(self.offer.question.vectors, self._is_sent_as_it_is)
        tensors = self._formed(under_way)
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
        fed = sum(torch.Size(place.shape).numel() for chunk in self.share.chunks for place in chunk)
        copying -= min(copying, under_way.marking_s)
        size = fed * self.delivery.dtype.itemsize
        return Moved(under_way.received, size, under_way.shards, copying, loading, under_way.marking_s)

    def prove(self, moved: Sequence[Moved]) -> Proof | None:
        """Compare the engine with what all processes hold; None where this process leads none.

        Raises:
            WeightSyncError: it holds something else.
        """
        if self.engine is None:
            trainer_log_probs(self.model, self.offer.question.rows, self.autocast)  # a forward pass needs all siblings
            return None
        failure = None
        try:
            self.engine.begin_proof(self.offer.question)
        except EngineDied as death:
            failure = death
        with self._threads():
            self.engine.look()
        if failure is not None:
            raise failure
        return self.engine.end_proof([one.shards for one in moved], max(one.marking_s for one in moved))

    def _fill(self, stream: Stream, tensors: Iterator[tuple[str, Tensor]]) -> float:
        if self.engine is not None:
            return stream.fill(self.share.chunks, tensors, self.delivery.dtype, self.engine.is_reading, self._note)
        return stream.fill(self.share.chunks, tensors, self.delivery.dtype, self._is_read)

    def _formed(self, under_way: UnderWay) -> Iterator[tuple[str, Tensor]]:
        """What goes to the engine, made of the tensors of the running model as they arrive."""
        coming = self.delivery.tensors({w.source.name: w.source for w in self.weights}, under_way)
        here: dict[str, Tensor] = {}
        wanted = [w for w in self.weights if w.source.name in self.share.wanted]
        last = {w.source.name: number for number, w in enumerate(wanted)}
        there = {place.name for chunk in self.share.chunks for place in chunk}
        for number, weight in enumerate(wanted):
            source = weight.source.name
            if weight.name not in there:
                continue
            while source not in here and weight.shape.numel():
                name, tensor = next(coming)
                here[name] = tensor
            whole = here[source] if source in here else weight.source.tensor.new_empty(weight.source.tensor.shape)
            yield weight.name, whole if weight.form is None else weight.form(whole)
            if last[source] == number:
                here.pop(source, None)
        for _ in coming:
            pass

    def _is_sent_as_it_is(self, name: str) -> bool:
        return name in self._plain

    @cached_property
    def _plain(self) -> set[str]:
        """Tensors whose marks are taken of their parts."""
        return {w.name for w in self.weights if w.form is None and len(w.shape) <= 2}

    def _note(self, name: str, tensor: Tensor) -> None:
        """The mark of a tensor that is made of a whole one."""
        if name not in self._plain and self.engine is not None:
            self.engine.note(name, tensor)

    def _is_read(self) -> bool:
        """Whether the engine that another process leads still reads this one's stream, or will go on to."""
        assert self.stream is not None
        if self.stream.is_abandoned or not _runs(self.offer.process_id):
            return False
        return self._watch is None or not self._watch.is_overdue

    @cached_property
    def _watch(self) -> ProgressWatch | None:
        """Of that engine; None where it cannot be watched from here."""
        try:
            progress = Progress.open(self.offer.progress_path)
        except OSError:
            return None
        return ProgressWatch(progress, self.offer.call_timeout_s)

    def _threads(self) -> AbstractContextManager[None]:
        return using_threads(self.offer.num_threads)


def _runs(process_id: int) -> bool:
    """Whether a process of this machine runs, and does not only wait for its parent to notice that it has ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
