"""Operations that are repeatable although torch does not call their kernels deterministic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_kernels(device: torch.device) -> Iterator[None]:
    """Inside, deterministic algorithms are not demanded on a GPU, because the result does not depend on the order.

    torch exempts no operation by name: it refuses some (sums along a row), and others take many times as long (writing
    to places that differ from each other, which it sorts first).
    """
    if device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns_only)
