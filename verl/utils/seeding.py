"""Seeds: every random number of a run derives from one integer and the name of its use."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch


def derive_seed(seed: int, *names: object) -> int:
    """A seed in [0, 2^63) for one named use; equal on every machine and independent of every other name."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and demand deterministic kernels.

    Backward passes of indexing are not deterministic without the last part; see torch.use_deterministic_algorithms.
    On a GPU an operation that has no deterministic form warns and goes on.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # Filling every new tensor with NaN finds reads of memory that nothing wrote, and makes nothing deterministic.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
