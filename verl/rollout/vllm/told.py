"""What the engine's process tells the trainer, who need not import vLLM to read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.resharding.layout import Box


@dataclass(frozen=True)
class Told:
    """What the engine tells of itself once it is there.

    Attributes:
        max_model_len: prompt and response together, in tokens.
        num_workers: processes that read the weights.
    """

    max_model_len: int
    num_workers: int


@dataclass(frozen=True)
class Drawn:
    """Responses: their lengths [B], their tokens one after another, and log-probs [B T]."""

    lengths: np.ndarray
    tokens: np.ndarray
    log_probs: torch.Tensor


@dataclass(frozen=True)
class Loaded:
    """What became of a load.

    Attributes:
        seconds: that it took, waiting for tensors left out.
        anew: why vLLM loaded its model anew; None where the tensors were put in their places.
    """

    seconds: float
    anew: str | None


Wanted = dict[str, Box]  # of each tensor the slice that one process of an engine takes
