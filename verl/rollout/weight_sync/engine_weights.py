"""The weights of the process of an engine, seen from the process that leads it: load, adapter, verification, sleep.

`WeightSync` calls this in the order of a sync: `begin`, `describe`, `begin_load`, `end_load`, `begin_verify`,
`end_verify`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from verl.errors import WeightSyncError
from verl.rollout.engine_process.messages import EngineInfo
from verl.rollout.engine_process.process import EngineProcess
from verl.rollout.proof.fingerprints import FingerprintParts, join_parts
from verl.rollout.proof.verifier import SyncVerifier, VerifyRequest
from verl.rollout.weight_sync.stream import Feed

log = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass
class EngineState:
    """Weights that one process holds, from its start to its end.

    Attributes:
        is_current: it has the weights of the last sync, verified.
        was_verified: a sync was verified before.
        was_probed: the last verification compared log-probs too, or need not; see `EngineWeights`.
        function_is_known: a verification has compared log-probs and every tensor.
        is_asleep: its GPU memory of weights, keys and values is freed.
        feeds: the streams that its workers read.
    """

    process_id: int | None
    is_current: bool = False
    was_verified: bool = False
    was_probed: bool = True
    function_is_known: bool = False
    is_asleep: bool = False
    feeds: list[Feed] | None = None


class EngineWeights:
    """The weights of the engine that this process leads.

    Args:
        num_threads: threads of trainer and engine each, while both work.
        gap_stops: see `BuildContext`. If set, only the first sync of a process compares log-probs of the probe: later
            syncs verify the tensors, and the log-prob gap of the step covers the computation.
    Attributes:
        in_place: tensors are copied into the engine's parameters; False: the engine reloads its whole model.
    """

    def __init__(
        self,
        process: EngineProcess,
        info: EngineInfo,
        verifier: SyncVerifier,
        num_threads: int,
        gap_stops: bool = False,
    ):
        self.process, self.info, self.verifier = process, info, verifier
        self.num_threads, self.in_place, self.gap_stops = num_threads, True, gap_stops
        self._state = EngineState(None)

    @property
    def state(self) -> EngineState:
        """State of the current process; a new process has no weights."""
        if self._state.process_id != self.process.process_id:
            self._state = EngineState(self.process.process_id)
        return self._state

    @property
    def needs_sync(self) -> bool:
        """Whether the engine needs a sync before it can generate."""
        return not (self.state.is_current and self.process.is_alive())

    def begin(self, prepare: Callable[[], bool]) -> tuple[VerifyRequest, tuple[int, bool]]:
        """Prepare for weights.

        Args:
            prepare: starts the engine if it is not running; returns whether it has open turns, which the probe would
                generate to their end.
        Returns:
            The request of the proof; the process, and whether tensors are loaded in place: a change of either repeats
            the agreement on layouts.
        """
        # before anything can fail, so that requests are numbered equally for all engines
        question = self.verifier.question()
        if prepare() or self._needs_no_probe:
            question = self.verifier.without_probe(question)
        self._wake("weights")
        assert self.state.process_id is not None
        return question, (self.state.process_id, self.in_place)

    def describe(self, shapes: dict[str, tuple[int, ...]] | None) -> EngineInfo:
        """The engine, with the slices that its workers need. `shapes` are of tensors that may be sent as slices; None:
        only whole tensors are sent.
        """
        wants, process = None, self.process
        if shapes is not None and self.in_place and self.info.num_workers > 1:
            slices = process.call("wants", shapes)
            wants = None if slices is None else tuple(slices)
        assert process.process_id is not None
        return replace(
            self.info,
            wants=wants,
            process_id=process.process_id,
            progress_path=process.progress_path,
            call_timeout_s=process.call_timeout_s,
            num_threads=self.num_threads,
        )

    def begin_load(self, feeds: list[Feed], dtype: torch.dtype) -> None:
        """Start reading the streams in the engine's workers; the layout is sent once."""
        self.state.is_current = False
        if self.state.feeds is not feeds:
            self.process.call("connect", feeds, dtype)
            self.state.feeds = feeds
        self.process.send("load", self.num_threads, self.in_place)

    def end_load(self) -> float:
        """Wait until all streams are read; returns the seconds of loading."""
        seconds, anew = self.process.answer()
        if anew is not None and self.in_place:
            self.in_place = False
            log.info("The engine reloads its whole model at each sync: %s", anew)
        return seconds

    def begin_verify(self, question: VerifyRequest) -> None:
        """Allocate keys and values, and start a verification in the engine."""
        self._wake("kv_cache")
        self.state.is_asleep = False
        self._ask_for_proof(question)

    def end_verify(self, parts: Sequence[FingerprintParts], seconds: float) -> dict[str, float]:
        """Compare the engine's reply with the trainer's fingerprints, made of the parts of all processes in `seconds`,
        and its log-probs; returns metrics.

        Raises:
            WeightSyncError: the engine does not hold their weights.
        """
        self.verifier.adopt(join_parts(parts), seconds)
        metrics = self.verifier.verify(self.process.answer())
        self.state.is_current = self.state.was_verified = True
        self.state.function_is_known |= "sync/probe_gap_nats" in metrics and not metrics["sync/unproven_tensors"]
        return metrics

    def _ask_for_proof(self, question: VerifyRequest) -> None:
        self.state.was_probed = bool(question.rows) or self._needs_no_probe
        self.process.send("prove", question)

    @property
    def _needs_no_probe(self) -> bool:
        return self.gap_stops and self.state.function_is_known

    def prove_function(self) -> None:
        """Compare log-probs of the probe if the last sync did not; no turns may be open.

        Raises:
            WeightSyncError: they differ.
        """
        if not self.state.was_probed:
            self._ask_for_proof(self.verifier.question(weights=False))
            self.verifier.verify(self.process.answer())

    def may_repeat(self, error: Exception) -> bool:
        """Whether a repeated sync may succeed after a failed verification: an engine may make more of a tensor than its
        layers tell, so after a first sync it reloads its whole model from now on."""
        if not isinstance(error, WeightSyncError) or not self.in_place or self.state.was_verified:
            return False
        log.warning(
            "Not all weights could be loaded in place: the engine reloads its whole model at each sync from now on."
        )
        self.in_place = False
        return True

    def sleep(self) -> None:
        """Free the engine's GPU memory, until the next sync."""
        if not self.state.is_asleep and self.process.is_alive():
            self.state.is_current = False
            self.process.call("sleep")
            self.state.is_asleep = True

    def _wake(self, what: str) -> None:
        """Restore the `weights` or the `kv_cache` of a sleeping engine."""
        if self.state.is_asleep:
            self.process.call("wake", what)
