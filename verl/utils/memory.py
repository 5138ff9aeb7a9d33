"""Device memory and main memory: how much is in use, the peak, and giving back what is free."""

from __future__ import annotations

import contextlib
import ctypes
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


_PROC = Path("/proc")


def peak_memory() -> dict[int, int]:
    """Process id -> the most bytes that were resident at a time, of this process and its living descendants.

    Without /proc (macOS) only this process is known.
    """
    if not (_PROC / "self/status").exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return {0: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    found, waiting = {}, [int((_PROC / "self").readlink().name)]
    while waiting:
        process = waiting.pop()
        try:
            found[process] = _high_water(process)
            for task in (_PROC / str(process) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):  # it has ended meanwhile, or the kernel does not tell of children
            continue
    return found


def forget_peak() -> None:
    """Count this process's peak from here on, where the kernel can: another run was here before."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return


def _high_water(process: int) -> int:
    for line in (_PROC / str(process) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {process} has no memory of its own")


def give_back() -> None:
    """Return to the system what allocators of this process keep of freed memory; a few milliseconds.

    glibc and Arrow keep it for later, which shows as resident memory well above what is in use.
    """
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
