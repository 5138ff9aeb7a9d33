"""Memory as the device counts it: how much is in use, and giving back what is only kept for later."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_STATM = Path("/proc/self/statm")


def used_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU; of this process where the device is the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def settle(device: torch.device) -> None:
    """Wait for what a GPU has still to do, so that a clock tells the truth."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def release_cached(device: Any) -> None:
    """Give memory that torch keeps for later back to the GPU; the CPU's allocator keeps none."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
