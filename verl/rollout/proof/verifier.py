"""Weight verification after every sync: the engine holds the trainer's weights and computes the trainer's function.

trainer   request ───────────────────────────────┐
          tensors ──────────> stream ──> engine  │
             │                                   v
          fingerprints, log-probs       <── reply: fingerprints through its layers, log-probs
             └──────────────── verify ───────────┘

Fingerprints of vectors (norms, biases) and columns of matrices are compared bit by bit; products with the sign vector
are compared up to rounding. For a row w of n entries the rounding error of its sum is some units of rounding of |w|,
where

    |w|^2  is about  (w . signs)^2, and about n times the mean square of its columns

so the expected error can be computed from both, without reading the matrix again.

Any trainer and any engine that gives fingerprints of its tensors can use this: it knows neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import ConfigError, WeightSyncError
from verl.rollout.proof.fingerprints import (
    LORA_B,
    Fingerprints,
    HostCopies,
    ProbeVectors,
    WeightFingerprint,
    adapter_tensors,
    dtype_name,
    fingerprint,
    tied_names,
    transposed_names,
)
from verl.rollout.proof.probe import allowed_nats


def tolerance(mark: WeightFingerprint) -> float:
    """The largest relative error of a sum that rounding explains."""
    if mark.width is None:
        return mark.slack
    unit = torch.finfo(getattr(torch, mark.dtype)).eps / 2
    return mark.slack + 4 * unit + 4 * 2.0**-24 * math.sqrt(mark.width)


def differing(expected: WeightFingerprint, found: WeightFingerprint) -> tuple[float, float] | None:
    """The largest relative difference and the threshold that it exceeds, or None if both sides agree."""
    if expected.values.shape != found.values.shape:
        return math.inf, 0.0
    if _agree_at_once(expected, found):
        return None
    gap = np.abs(expected.values - found.values)  # nan wherever one of them is
    size = _row_sizes(expected)
    if expected.width is not None:
        allowed = tolerance(expected)
        if not (gap[0] <= allowed * size).all():
            return _largest(gap[0], size), allowed
        gap, expected = gap[1:], WeightFingerprint(expected.values[1:], None, expected.dtype, expected.slack)
        size = size / math.sqrt(found.width or 1)
    if not (gap <= expected.slack * np.abs(expected.values)).all():
        return _largest(gap.max(axis=0), size), expected.slack
    return None


def _agree_at_once(expected: WeightFingerprint, found: WeightFingerprint) -> bool:
    """Whether columns, or a vector, are equal, and sums closer than the average row allows: nearly always, in one pass.
    What it denies is looked at row by row."""
    if expected.width is None:
        return np.array_equal(expected.values, found.values)
    if not expected.values.size or not np.array_equal(expected.values[1:], found.values[1:]):
        return False
    signs, columns = expected.values[0], expected.values[1:].reshape(-1)
    square = (np.vdot(signs, signs) / signs.size + expected.width * np.vdot(columns, columns) / columns.size) / 2
    return bool(np.abs(signs - found.values[0]).max() <= 0.99 * tolerance(expected) * math.sqrt(square))


def _row_sizes(mark: WeightFingerprint) -> np.ndarray:
    """Approximate norm of each row (for a vector: of each entry), at least that of the tensor's average row."""
    if mark.width is None:
        squares = mark.values**2
        return np.full(mark.values.shape[1], math.sqrt(squares.mean()) if squares.size else 0.0)
    squares = (mark.values[0] ** 2 + mark.width * (mark.values[1:] ** 2).mean(axis=0)) / 2
    return np.sqrt(np.maximum(squares, squares.mean()))


def _largest(gap: np.ndarray, size: np.ndarray) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = gap / size
    return math.inf if np.isnan(ratio).any() else float(ratio.max())


def compare(
    expected: Fingerprints,
    found: Fingerprints,
    previous: Fingerprints | None = None,
    tied: Mapping[str, str] | None = None,
    shown: int = 8,
) -> dict[str, str]:
    """The faults of the engine's tensors, by name, with the likely cause for the first `shown` of them.

    Args:
        expected, found: the trainer's and the engine's.
        previous: the trainer's at the previous sync.
        tied: name of a tensor that is not sent -> name of the tensor that it equals.
    """
    faults = {}
    for name in filter(found.__contains__, expected):
        broken = differing(expected[name], found[name])
        if broken is None and _eps(found[name]) <= _eps(expected[name]):
            continue
        relative, threshold = broken or (0.0, 0.0)
        likely = _likely(name, expected, found[name], previous or {}) if len(faults) < shown else ""
        if tied and name in tied:
            likely += f"; it is tied to {tied[name]}, and has to be loaded with it"
        faults[name] = f"off by {relative:.1e} of its size (allowed {threshold:.1e}); {likely}"
    faults |= {name: "the engine has no such tensor, or does not use it" for name in expected if name not in found}
    return faults | {name: "the trainer sent no such tensor" for name in found if name not in expected}


def _likely(name: str, expected: Fingerprints, found: WeightFingerprint, previous: Fingerprints) -> str:
    mine = expected[name]
    if _eps(found) > _eps(mine):
        return f"it is held in {found.dtype}, where {mine.dtype} is expected"
    if mine.values.shape != found.values.shape:
        return f"its shape is {_shape(found)}, where {_shape(mine)} is expected"
    if np.isnan(found.values).any():
        return "it holds nan, or some ranks of the engine hold another one than others, or no rank holds all of it"
    if not found.values.any():
        return "it is all zeros there, as if it had been left out"
    if other := _holder(found, expected):
        return f"it holds what {other} should"
    if rounded := _rounded(mine, found):
        return f"it was rounded to {rounded} on its way"
    if name in previous and _is_nearer(found, previous[name], mine):
        return "it is stale: it holds what the sync before brought"
    if (mine.values == found.values).mean() > 0.5:
        return "a part of it is not the trainer's"
    return "it holds none of the trainer's tensors"


def _holder(found: WeightFingerprint, expected: Fingerprints) -> str | None:
    same_shape = (n for n, mark in expected.items() if mark.values.shape == found.values.shape)
    return next((name for name in same_shape if differing(expected[name], found) is None), None)


def _rounded(mine: WeightFingerprint, found: WeightFingerprint) -> str | None:
    """The narrower data type to which the values have been rounded, if any."""
    exact = slice(None) if mine.width is None else slice(1, None)
    wanted = torch.from_numpy(mine.values[exact])
    for dtype in (torch.float16, torch.bfloat16):
        if wanted.numel() and torch.equal(wanted.to(dtype).float(), torch.from_numpy(found.values[exact])):
            return str(dtype).removeprefix("torch.")
    return None


def _is_nearer(found: WeightFingerprint, before: WeightFingerprint, now: WeightFingerprint) -> bool:
    """Compared by the first row of values, which uses the same vector in every sync."""
    if before.values.shape != now.values.shape:
        return False
    to_before = np.abs(found.values[0] - before.values[0]).sum()
    return bool(to_before < 0.5 * np.abs(found.values[0] - now.values[0]).sum())


def _shape(mark: WeightFingerprint) -> list[int]:
    return [mark.values.shape[1]] if mark.width is None else [mark.values.shape[1], mark.width]


def _eps(mark: WeightFingerprint) -> float:
    return torch.finfo(getattr(torch, mark.dtype)).eps


@dataclass(frozen=True)
class VerifyRequest:
    """Request for a verification.

    Attributes:
        vectors: of this sync.
        rows: tokens of the probe; none where the engine has open turns.
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
        fingerprints: of its tensors by their Hugging Face names.
        log_probs: of the probe.
        unproven: name prefixes of tensors that cannot be read in this engine.
        seconds: time spent on them.
    """

    fingerprints: Fingerprints
    log_probs: np.ndarray
    unproven: tuple[str, ...] = ()
    seconds: float = 0.0


class SyncVerifier:
    """The trainer's side of all syncs to one engine.

    For each sync, in this order: `question` (to the engine); `add_fingerprint` for each tensor, or `adopt`, and
    `add_adapter_fingerprints`; and `verify` with the engine's reply.

    Args:
        model: that trains, with its adapter if it has one.
        dtype: data type of the engine.
        rows: tokens of the probe, see `probe_rows`; none: tensors alone are compared.
        log_probs: computes the trainer's log-probs [rows, length - 1] of the probe.
        compute_type: data type of these log-probs; `tf32` if float32 products are rounded.
    Attributes:
        tied: name of a tensor that is not sent -> name of the tensor that it equals.
        transposed: names of matrices that the model keeps as [in, out].
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        rows: tuple[tuple[int, ...], ...] = (),
        log_probs: Callable[[tuple[tuple[int, ...], ...]], np.ndarray] | None = None,
        compute_type: str = "float32",
    ):
        if rows and log_probs is None:
            raise ValueError(f"rows has {len(rows)} rows: log_probs has to compute the trainer's log-probs of them.")
        self.model, self.dtype, self.rows, self.compute_type = model, dtype, rows, compute_type
        self._log_probs = log_probs
        self.tied, self.transposed = tied_names(model), transposed_names(model)
        self.version = 0
        self._previous: Fingerprints = {}
        self._begin_sync()

    def question(self, *, weights: bool = True, adapter_rank: int | None = None) -> VerifyRequest:
        """Begin a sync.

        Args:
            weights: the model's weights are sent.
            adapter_rank: an adapter of this rank is sent.
        """
        self._begin_sync()
        self.version += 1
        return VerifyRequest(self._vectors, self.rows, weights, adapter_rank)

    def _begin_sync(self) -> None:
        self._vectors, self._copies, self._seconds = ProbeVectors(self.version), HostCopies(), 0.0
        self._fingerprints: Fingerprints = {}
        self._seen: tuple[np.ndarray, float] | None = None  # log-probs of this sync's weights, and seconds

    @property
    def fingerprints(self) -> Fingerprints:
        """The trainer's fingerprints of this sync so far, by name."""
        self._copies.finish()
        return self._fingerprints

    def without_probe(self, question: VerifyRequest) -> VerifyRequest:
        """The same question about tensors alone; log-probs are not compared."""
        self._seen = np.zeros(0), 0.0
        return replace(question, rows=())

    def add_fingerprint(self, name: str, tensor: Tensor, slack: float = 0.0) -> None:
        """Compute the fingerprint of one tensor, while it is sent, so that no tensor is read twice."""
        began = time.perf_counter()
        matrix = tensor.T if name in self.transposed else tensor
        with self._copies:
            mark = fingerprint(matrix, self._vectors, self.dtype, slack)
        self.adopt({name: mark}, time.perf_counter() - began)

    def add_adapter_fingerprints(self, adapter: Mapping[str, Tensor]) -> None:
        """Compute fingerprints of the adapter, whose whole tensors are given by their names in the model."""
        for name, tensor in adapter_tensors(self.model, adapter):
            # The engine multiplies B by its scale in its own type, after rounding B to it.
            self.add_fingerprint(name, tensor, 2 * torch.finfo(self.dtype).eps if name.endswith(LORA_B) else 0.0)

    def adopt(self, fingerprints: Fingerprints, seconds: float = 0.0) -> None:
        """Use fingerprints that were computed elsewhere in so many seconds, each under all names of its tensor."""
        self._fingerprints |= fingerprints
        self._fingerprints |= {alias: fingerprints[name] for alias, name in self.tied.items() if name in fingerprints}
        self._seconds += seconds

    def compute_probe_log_probs(self) -> None:
        """Compute the log-probs of the probe, during the transfer or the engine's verification; otherwise `verify`
        computes them.
        """
        began = time.perf_counter()
        log_probs = self._log_probs(self.rows) if self._log_probs is not None else np.zeros(0)
        self._seen = log_probs, time.perf_counter() - began

    def verify(self, engine: VerifyReply) -> dict[str, float]:
        """Compare both sides; returns metrics `sync/...`.

        Raises:
            WeightSyncError: they differ; names the tensors.
            ConfigError: without the probe nothing is known of some tensors.
        """
        if self._seen is None:
            self.compute_probe_log_probs()
        assert self._seen is not None
        began, own = time.perf_counter(), self.fingerprints
        (log_probs, seconds), self._seen = self._seen, None
        unread = engine.unproven or ("\0",)
        expected = {name: mark for name, mark in own.items() if not name.startswith(unread)}
        faults = compare(expected, engine.fingerprints, self._previous, self.tied)
        gaps = np.abs(log_probs - engine.log_probs)
        gap = float(gaps.mean()) if gaps.size else math.nan
        allowed = allowed_nats(dtype_name(self.dtype), self.compute_type)
        if faults:
            texts = [f"{name}: {fault}" for name, fault in faults.items()]
            raise WeightSyncError(list(faults), texts, len(expected), gap)
        if gaps.size and not gap <= allowed:
            raise WeightSyncError([], [], len(expected), gap, allowed)
        if engine.unproven and not gaps.size:
            raise ConfigError(
                f"rollout.kv_cache is keep: the tensors {', '.join(engine.unproven)}* cannot be read in this engine, "
                "and log-probs that would prove them are not computed while responses are open. Set "
                "rollout.kv_cache=recompute."
            )
        self._previous |= own
        seconds += self._seconds + engine.seconds + time.perf_counter() - began
        unproven = float(len(own) - len(expected))  # tensors covered only by the probe
        metrics = {"sync/proof_s": seconds, "sync/unproven_tensors": unproven}
        return metrics | ({"sync/probe_gap_nats": gap} if gaps.size else {})
