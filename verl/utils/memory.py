"""Memory of devices and processes: usage, peak, and release of cached memory."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.errors import ConfigError
from verl.utils.main_memory import keep_freed_memory

if TYPE_CHECKING:
    import torch


Result = TypeVar("Result")


def used_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU; resident memory of this process for the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def refuse_device(device: str | int | torch.device, path: str) -> None:
    """Raises ConfigError if torch has no such device here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is {device!r}: torch has no {device} here ({reason}).") from error


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU in bytes.

    Attributes:
        free: not allocated by any process.
        own: used by tensors of this process.
    """

    total: int
    free: int
    own: int = 0


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of a GPU that this process uses, after emptying the caching allocator."""
    import torch

    release_cached(device, always=True)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_allocated(device))


CUDNN_VARIABLE = "VERL_CUDNN_SDPA"  # 1: keep the attention kernel of cuDNN


def make_current(device: str) -> None:
    """Make a GPU the current device, or prepare the memory of a process that computes on the CPU. Called before a model
    is built; a driver without models must not call it, since it opens a CUDA context.

    The attention kernel of cuDNN is turned off, unless `VERL_CUDNN_SDPA=1`: it compiles a plan for each new shape,
    which takes up to seconds, and packed rows have new shapes in every micro-batch.
    """
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(torch.device(device).index or 0)
        torch.backends.cuda.enable_cudnn_sdp(os.environ.get(CUDNN_VARIABLE) == "1")
    else:
        keep_freed_memory()


def computes_bfloat16(device: str) -> bool:
    """Whether a device computes in bfloat16 without emulation: GPUs do from Ampere on. A CPU counts as one that does
    not, since few have products in it; see `bfloat16_here`."""
    if not device.startswith("cuda"):
        return False
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def bfloat16_here() -> str | None:
    """`bfloat16` where this machine has products in it, on its GPU or in a CPU with AMX or AVX512-BF16; else None."""
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if computes_bfloat16("cuda") else None
    return "bfloat16" if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() else None


def on_current_device(work: Callable[..., Result]) -> Callable[..., Result]:
    """A function for another thread, in which it takes the GPU that is current in this one: a thread begins with the
    first GPU of the machine, and kernels that are compiled here run on the current one."""
    import torch

    if not torch.cuda.is_initialized():  # by this process, which may have no GPU
        return work
    device = torch.cuda.current_device()

    def run(*args: Any, **kwargs: Any) -> Result:
        torch.cuda.set_device(device)
        return work(*args, **kwargs)

    return run


def gpu_memory_from_outside(index: int) -> DeviceMemory | None:
    """Memory of a GPU by its index in this process, without opening a CUDA context, which would take half a GiB. None
    if `nvidia-smi` does not report it.
    """
    try:
        total, free = (int(field) << 20 for field in _nvidia_smi(index, "memory.total,memory.free"))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return DeviceMemory(total, free)


def gpu_name_from_outside(index: int) -> str | None:
    """The name of a GPU, without opening a CUDA context."""
    try:
        return _nvidia_smi(index, "name")[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _nvidia_smi(index: int, fields: str) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    name = names[index].strip() if index < len(names) else str(index)
    query = ["nvidia-smi", f"--id={name}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    return output.strip().splitlines()[0].split(",")


def settle(device: torch.device) -> None:
    """Synchronise with a GPU, for correct timing."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


_keeps_cached = False


def keep_cached(keeps: bool) -> None:
    """Whether `release_cached` does nothing in this process from now on: no other process needs the GPU's memory. Torch
    itself gives back what it keeps before an allocation of its own fails."""
    global _keeps_cached
    _keeps_cached = keeps


def release_cached(device: Any, *, always: bool = False) -> None:
    """Empty the caching allocator of a GPU, unless `keep_cached` says otherwise; does nothing for the CPU."""
    import torch

    if torch.device(device).type == "cuda" and (always or not _keeps_cached):
        torch.cuda.empty_cache()


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextlib.contextmanager
def shareable_allocations() -> Iterator[None]:
    """Inside this context GPU memory is allocated so that other processes can open it.

    `expandable_segments:True` maps memory in pieces, which another process opens by a system call that containers
    refuse. torch resets all allocator settings that a call does not list, so all of them are listed.
    """
    import torch

    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    before = read() if read is not None else next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), "")
    without = _without_expandable(before)
    if without == before:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(without)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def _without_expandable(settings: str) -> str:
    """Settings of torch's allocator with expandable segments turned off, if they are on."""
    pairs = [pair.strip() for pair in settings.split(",")]
    is_on = [pair.replace(" ", "").lower() in ("expandable_segments:true", "expandable_segments:1") for pair in pairs]
    if not any(is_on):
        return settings
    return ",".join("expandable_segments:False" if on else pair for pair, on in zip(pairs, is_on, strict=True))


_PROC = Path("/proc")


def peak_memory() -> dict[int, int]:
    """Peak resident bytes by process id, of this process and its living descendants."""
    peaks, waiting = {}, [int((_PROC / "self").readlink().name)]
    while waiting:
        process = waiting.pop()
        try:
            peaks[process] = _status_bytes(process, "VmHWM")
            for task in (_PROC / str(process) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):  # it has ended, or the kernel does not list children
            continue
    return peaks


def forget_peak() -> None:
    """Reset the peak of this process, if the kernel supports it, for a second run in one process."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return


def _status_bytes(process: int | str, name: str) -> int:
    """An entry of the kernel's status of a process, in bytes.

    Raises:
        OSError: the process has ended.
        ValueError: there is no such entry: the process has no memory of its own.
    """
    for line in (_PROC / str(process) / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {process} has no {name}")
