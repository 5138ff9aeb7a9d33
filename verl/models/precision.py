"""Matrix products in a narrower type than the weights are kept in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

Autocast = Literal["bfloat16"] | None


def computing_in(dtype: Autocast, device: torch.device | str) -> AbstractContextManager[Any]:
    """The context in which a model computes: torch.autocast to `dtype`, or nothing for None."""
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16 if dtype else None, enabled=dtype is not None)
