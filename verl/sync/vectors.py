"""The vectors that are sent through every layer, the same ones on both sides of a sync.

A layer shows W x alone, since engines re-pack their weights. Two kinds of x make that tell much of W:

    signs     x_j = +-1        exact in every type, so W x differs by rounding of the sum alone; every entry counts
    columns   x = e_j          W x is column j itself, bit by bit: one product, and zeros

A whole sync left out changes every column, however small the step; what is local to a part of a matrix shows in the
signs, and in a column of each quarter. The columns move on with every sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from verl.ops.counter_rng import uniform

COLUMNS = 4  # one in each quarter of the width
_SEED = 0x5EED


@dataclass(frozen=True)
class Vectors:
    """The vectors of one sync.

    They depend on the width of a layer alone, so that a tensor is recognised in the place of another of its shape.

    Args:
        version: number of the sync.
    """

    version: int = 0

    def columns(self, width: int) -> tuple[int, ...]:
        """Which columns are read: at most `COLUMNS`, each moving through its part of the width from sync to sync."""
        count = min(COLUMNS, width)
        bounds = [width * part // count for part in range(count + 1)]
        return tuple(low + self.version % (high - low) for low, high in pairwise(bounds))

    def signs(self, width: int, device: torch.device | str = "cpu") -> Tensor:
        """[width] of +-1, float32, the same in every sync."""
        return _signs(width).to(device)

    def inputs(self, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """[1 + columns, width]: the signs, then a unit vector for each column."""
        return _inputs(self.columns(width), width, dtype, torch.device(device))


@lru_cache(maxsize=32)
def _inputs(columns: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of the layers of one width; the next sync has others."""
    rows = torch.zeros(1 + len(columns), width)
    rows[0] = _signs(width)
    rows[range(1, len(rows)), columns] = 1.0
    return rows.to(device, dtype)


@lru_cache(maxsize=64)
def _signs(width: int) -> Tensor:
    noise = uniform(_SEED, 0, torch.arange(width), torch.tensor(0), torch.tensor(0))
    return torch.where(noise < 0.5, -1.0, 1.0)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Within, products of float32 are made in float32, not in a narrower type such as TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
