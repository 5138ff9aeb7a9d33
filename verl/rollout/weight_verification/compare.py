"""Comparison of trainer and engine fingerprints: which tensors differ, by how much, and what they hold instead.

Vectors (norms, biases) and columns of matrices are compared bit by bit; products with the sign vector are compared up
to rounding. For a row w of n entries the rounding error of its sum is some units of rounding of |w|, where

    |w|^2  is about  (w . signs)^2, and about n times the mean square of its columns

so the expected error can be computed from both, without reading the matrix again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from verl.rollout.weight_verification.fingerprint import Fingerprints, WeightFingerprint


@dataclass(frozen=True)
class TensorMismatch:
    """A tensor that differs between both sides.

    Attributes:
        name: of the tensor in the Hugging Face model.
        relative: the largest difference, relative to the size of the compared values.
        threshold: the allowed difference; 0: bit by bit.
        likely: what the engine probably holds instead.
    """

    name: str
    relative: float
    threshold: float
    likely: str = ""

    def __str__(self) -> str:
        return f"{self.name}: off by {self.relative:.1e} of its size (allowed {self.threshold:.1e}); {self.likely}"


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
) -> list[TensorMismatch]:
    """The tensors that differ, with the likely cause for the first `shown` of them.

    Args:
        expected, found: the trainer's and the engine's.
        previous: the trainer's at the previous sync.
        tied: as in `FingerprintLog`.
    """
    differences = []
    for name in expected:
        broken = differing(expected[name], found[name]) if name in found else None
        narrow = name in found and _eps(found[name]) > _eps(expected[name])
        if broken or narrow:
            relative, threshold = broken or (0.0, 0.0)
            likely = _likely(name, expected, found[name], previous or {}) if len(differences) < shown else ""
            if tied and name in tied:
                likely += f"; it is tied to {tied[name]}, and has to be loaded with it"
            differences.append(TensorMismatch(name, relative, threshold, likely))
    return differences


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


def only_in(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names that the other side does not have, in order."""
    others = set(others)
    return [name for name in names if name not in others]
