"""What the trainer asks an engine after a sync, and what the engine answers; both travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl.sync.marks import Marks
from verl.sync.vectors import Vectors


@dataclass(frozen=True)
class Question:
    """What is to be proven.

    Attributes:
        vectors: of this sync.
        rows: tokens of the probe.
        weights: the weights of the model are to be proven.
        adapter_rank: that of the adapter to be proven, or None.
    """

    vectors: Vectors
    rows: tuple[tuple[int, ...], ...]
    weights: bool = True
    adapter_rank: int | None = None


@dataclass(frozen=True)
class Answer:
    """What the engine holds.

    Attributes:
        marks: of its tensors by their Hugging Face names.
        log_probs: of the probe.
        unproven: beginnings of the names of tensors that cannot be read in this engine.
        seconds: that the answer took.
    """

    marks: Marks
    log_probs: np.ndarray
    unproven: tuple[str, ...] = ()
    seconds: float = 0.0
