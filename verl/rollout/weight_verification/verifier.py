"""Weight verification after every sync: the engine holds the trainer's weights and computes the trainer's function.

trainer   request ───────────────────────────────┐
          tensors ── watch ──> stream ──> engine  │
                       │                          v
              fingerprints, log-probs   <── reply: fingerprints through its layers, log-probs
                       └────────── verify ─────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import WeightSyncError
from verl.models.parallel_info import Autocast, compute_type
from verl.rollout.weight_verification.compare import compare, only_in
from verl.rollout.weight_verification.fingerprint import (
    FingerprintLog,
    Fingerprints,
    ProbeVectors,
    dtype_name,
    tied_names,
    transposed_names,
)
from verl.rollout.weight_verification.logprob_probe import allowed_nats, probe_rows, trainer_log_probs
from verl.rollout.weight_verification.vllm_params import LORA_B, adapter_tensors


@dataclass(frozen=True)
class VerifyRequest:
    """Request for a verification.

    Attributes:
        vectors: of this sync.
        rows: tokens of the probe.
        weights: whether to verify the weights of the model.
        adapter_rank: rank of the adapter to verify, or None.
    """

    vectors: ProbeVectors
    rows: tuple[tuple[int, ...], ...]
    weights: bool = True
    adapter_rank: int | None = None


@dataclass(frozen=True)
class VerifyReply:
    """Fingerprints and log-probs of the engine.

    Attributes:
        fingerprints: fingerprints of its tensors by their Hugging Face names.
        log_probs: of the probe.
        unproven: name prefixes of tensors that cannot be read in this engine.
        seconds: time spent on the reply.
    """

    fingerprints: Fingerprints
    log_probs: np.ndarray
    unproven: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainerSide:
    """Fingerprints and log-probs of the trainer.

    Attributes:
        fingerprints: of its tensors by their Hugging Face names.
        log_probs: of the probe.
        dtype: data type of the engine.
        tied: as in `FingerprintLog`.
        previous: its fingerprints at the previous sync.
        seconds: time spent on fingerprints and log-probs.
        compute_type: data type of its log-probs; `tf32` if float32 products are rounded.
    """

    fingerprints: Fingerprints
    log_probs: np.ndarray
    dtype: str = "float32"
    tied: Mapping[str, str] = field(default_factory=dict)
    previous: Fingerprints = field(default_factory=dict)
    seconds: float = 0.0
    compute_type: str = "float32"


@dataclass(frozen=True)
class VerificationResult:
    """Result of a successful verification.

    Attributes:
        metrics: `sync/...`.
        seconds: of both sides together.
        num_tensors: number of tensors verified individually.
    """

    metrics: dict[str, float]
    seconds: float
    num_tensors: int


def verify_sync(trainer: TrainerSide, engine: VerifyReply) -> VerificationResult:
    """Compare both sides.

    Raises:
        WeightSyncError: they differ; names the tensors.
    """
    began = time.perf_counter()
    expected = {
        name: mark for name, mark in trainer.fingerprints.items() if not name.startswith(engine.unproven or ("\0",))
    }
    differences = compare(expected, engine.fingerprints, trainer.previous, trainer.tied)
    faults = [str(difference) for difference in differences]
    missing, extra = only_in(expected, engine.fingerprints), only_in(engine.fingerprints, expected)
    faults += [f"{name}: the engine has no such tensor, or does not use it" for name in missing]
    faults += [f"{name}: the trainer sent no such tensor" for name in extra]
    gaps = np.abs(trainer.log_probs - engine.log_probs)
    gap, allowed = float(gaps.mean()), allowed_nats(trainer.dtype, trainer.compute_type)
    if faults:
        raise WeightSyncError([d.name for d in differences] + missing + extra, faults, len(expected), gap)
    if not gap <= allowed:
        raise WeightSyncError([], [], len(expected), gap, allowed)
    seconds = trainer.seconds + engine.seconds + time.perf_counter() - began
    unproven = float(len(trainer.fingerprints) - len(expected))  # tensors covered only by the probe
    metrics = {"sync/probe_gap_nats": gap, "sync/proof_s": seconds, "sync/unproven_tensors": unproven}
    return VerificationResult(metrics, seconds, len(expected))


class SyncVerifier:
    """The trainer's side of all syncs to one engine.

    For each sync, in this order: `question` (to the engine); `watch` around the stream of weights, or
    `add_fingerprint` for each of them, or `add_adapter_fingerprints`; and `verify_sync` with the engine's answer.

    Args:
        model: that trains, with its adapter if it has one.
        dtype: data type of the engine.
        vocab_size: number of token ids that a prompt may contain.
        context: context length of the engine, in tokens.
        autocast: of the actor.
    """

    def __init__(self, model: Any, dtype: torch.dtype, vocab_size: int, context: int, autocast: Autocast = None):
        self.model, self.dtype = model, dtype
        self.autocast: Autocast = autocast
        self.rows = probe_rows(vocab_size, context)
        self.tied, self.transposed = tied_names(model), transposed_names(model)
        self.version = 0
        self._ledger: FingerprintLog | None = None
        self._previous: Fingerprints = {}
        self._seen: tuple[np.ndarray, float] | None = None  # log-probs of this sync's weights, and seconds

    def question(self, *, weights: bool = True, adapter_rank: int | None = None) -> VerifyRequest:
        """Begin a sync.

        Args:
            weights: the model's weights are sent.
            adapter_rank: an adapter of this rank is sent.
        """
        vectors = ProbeVectors(self.version)
        self.version += 1
        self._seen = None
        self._ledger = FingerprintLog(vectors, self.dtype, self.tied, self.transposed)
        return VerifyRequest(vectors, self.rows, weights, adapter_rank)

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same names and tensors, which are sent to the engine, and compute their fingerprints."""
        assert self._ledger is not None, "question() begins a sync"
        return self._ledger.watch(tensors)

    def add_fingerprint(self, name: str, tensor: Tensor) -> Tensor:
        """Compute the fingerprint of one tensor and return the tensor."""
        assert self._ledger is not None, "question() begins a sync"
        self._ledger.add_fingerprint(name, tensor)
        return tensor

    def add_adapter_fingerprints(self) -> None:
        """Compute fingerprints of the adapter instead of the weights."""
        assert self._ledger is not None, "question() begins a sync"
        for name, tensor in adapter_tensors(self.model):
            # The engine multiplies B by its scale in its own type, after rounding B to it.
            self._ledger.add_fingerprint(
                name, tensor, slack=2 * torch.finfo(self.dtype).eps if name.endswith(LORA_B) else 0.0
            )

    def adopt(self, fingerprints: Fingerprints, seconds: float = 0.0) -> None:
        """Use fingerprints that were combined from parts, instead of computing them from whole tensors."""
        assert self._ledger is not None, "question() begins a sync"
        for name, mark in fingerprints.items():
            self._ledger.add(name, mark)
        self._ledger.seconds += seconds

    def compute_probe_log_probs(self) -> None:
        """Compute the log-probs of the probe, during the transfer or the engine's verification; otherwise `verify_sync`
        computes them.
        """
        assert self._ledger is not None, "question() begins a sync"
        began = time.perf_counter()
        log_probs = trainer_log_probs(self.model, self.rows, self.autocast)
        self._seen = log_probs, time.perf_counter() - began

    def verify(self, engine: VerifyReply) -> VerificationResult:
        """Compare with the engine's reply; see `verify_sync`."""
        assert self._ledger is not None, "question() begins a sync"
        if self._seen is None:
            self.compute_probe_log_probs()
        assert self._seen is not None
        (log_probs, seconds), self._seen = self._seen, None
        dtype, seconds = dtype_name(self.dtype), seconds + self._ledger.seconds
        own_type = compute_type(self.model, self.autocast)
        side = TrainerSide(self._ledger.fingerprints, log_probs, dtype, self.tied, self._previous, seconds, own_type)
        proof = verify_sync(side, engine)
        self._previous |= self._ledger.fingerprints
        return proof
