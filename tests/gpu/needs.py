"""What a test on GPUs asks of its machine: whatever is lacking is named as the reason why it was skipped."""

import os

import pytest
import torch

from verl.utils.env_check import vllm_fault

GIB = 1 << 30
ASSUMED = int(os.environ.get("VERL_ASSUMED_GPUS", "0"))  # of 80 GiB, where a dry run of benchmarks/gpu.py has none


def gpus(count: int = 1, memory_gib: float = 0.0) -> list[pytest.MarkDecorator]:
    """The mark of these tests, and a reason to skip where there are fewer GPUs, or smaller ones."""
    there, sizes = ASSUMED, [80.0] * ASSUMED
    if torch.cuda.is_available():
        there = torch.cuda.device_count()
        sizes = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(min(count, there))]
    lacking = f"needs {count} CUDA device{'s' if count > 1 else ''}; this machine has {there}"
    if there >= count:
        least = min(sizes, default=0.0)
        lacking = (
            f"needs {memory_gib:g} GiB on each GPU; the smallest here has {least:.0f}" if least < memory_gib else ""
        )
    return [pytest.mark.gpu, pytest.mark.skipif(bool(lacking), reason=lacking)]


def vllm() -> pytest.MarkDecorator:
    """A reason to skip where vLLM for GPUs is not installed."""
    has_gpu = torch.cuda.is_available() or ASSUMED
    fault = vllm_fault(is_on_gpu=True) if has_gpu else "needs vLLM for GPUs, and a CUDA device"
    return pytest.mark.skipif(fault is not None, reason=str(fault))
