"""The weights of the process of an engine, seen from the process that leads it: load, adapter, verification, sleep.

`WeightSync` calls this in the order of a sync: `begin`, `describe`, `begin_load`, `end_load`, `begin_verify`,
`end_verify`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.errors import WeightSyncError
from verl.rollout.base import SyncResult
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
        model: that trains.
        lora_rank: rank of an adapter that is sent unmerged, after the base weights; None for merged.
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
        model: Any,
        verifier: SyncVerifier,
        lora_rank: int | None,
        num_threads: int,
        gap_stops: bool = False,
    ):
        self.process, self.info, self.model, self.verifier = process, info, model, verifier
        self.lora_rank, self.num_threads, self.in_place = lora_rank, num_threads, True
        self.gap_stops = gap_stops
        self._state, self._num_adapters, self._sends_all = EngineState(None), 0, True

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
        self._sends_all = self.lora_rank is None or self.needs_sync
        # before anything can fail, so that requests are numbered equally for all engines
        question = self.verifier.question(weights=self._sends_all, adapter_rank=self.lora_rank)
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
        self.state.is_current, self._sends_all = False, True
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

    def begin_verify(self, question: VerifyRequest, adapter: Mapping[str, torch.Tensor]) -> SyncResult | None:
        """Allocate keys and values, load an adapter if there is one, and start a verification in the engine.

        Args:
            adapter: its whole tensors, by their names in the model.
        Returns:
            Result of sending the adapter.
        """
        self._wake("kv_cache")
        self.state.is_asleep = False
        sent = self._send_adapter(adapter) if question.adapter_rank is not None else None
        self._ask_for_proof(question)
        return sent

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

    def _send_adapter(self, adapter: Mapping[str, torch.Tensor]) -> SyncResult:
        """Send a new adapter under a new number, in a directory in memory; the previous one is removed."""
        self.state.is_current = False
        self._num_adapters += 1
        directory = self.process.files.directory / f"adapter_{self._num_adapters}"
        start = time.perf_counter()
        self.model.save_pretrained(directory, state_dict=adapter)
        copying = time.perf_counter() - start
        try:
            loading = self.process.call("adopt", str(directory), self._num_adapters)
            size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self.verifier.add_adapter_fingerprints(adapter)
        metrics = {"sync/copy_s": copying, "sync/load_s": loading, "sync/bytes": float(size)}
        return SyncResult(f"adapter {self._num_adapters}, {size / MIB:.1f} MiB to the engine", metrics)

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
        """Whether a repeated sync may succeed after a failed verification.

        The frozen weights below an adapter may have been changed: the next sync sends them too. And an engine may
        make more of a tensor than its layers tell: after a first sync it reloads its whole model from now on.
        """
        if not isinstance(error, WeightSyncError):
            return False
        if not self._sends_all:
            return not error.faults
        if not self.in_place or self.state.was_verified:
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
