"""Matrix products of a CPU: of float32 by oneDNN instead of MKL, and with packed weights while a rollout decodes.

PyTorch computes float32 products by MKL, which on AMD processors uses kernels for 256-bit vectors. oneDNN, which is
part of every PyTorch build for x86, has kernels for 512-bit vectors there: the same arithmetic in another order. After
`use_library("onednn")`, `aten::mm` and `aten::addmm` of float32 matrices on the CPU, and with them linear layers and
their gradients, are computed by oneDNN where it is faster. Products of bfloat16, which PyTorch computes by oneDNN,
only change inside of `packed_weights`. Other types, devices and small products are untouched.

Which library computes a product depends on its shape alone, so that a run repeats bit by bit. The last bits differ
between the libraries.
"""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

CpuMatmul = Literal["auto", "mkl", "onednn"]

# Below so many multiplications MKL is faster (benchmarks/matmul_share.py --products). A packed weight of this size is
# faster with any number of rows, since oneDNN need not reorder it.
SMALL = 1 << 22
PACKED_WEIGHT = 1 << 18

_linear = torch.ops.mkldnn._linear_pointwise.default
_override: Any = None  # the registered kernels, while oneDNN computes float32 products, or weights are packed
_library: Literal["mkl", "onednn"] = "mkl"  # of float32 products
# (address, shape, strides) of weight^T -> packed
_packed: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}


def chosen_library(wanted: CpuMatmul) -> Literal["mkl", "onednn"]:
    """The library that a setting means on this processor.

    `auto` is oneDNN on AMD processors with AVX-512, and MKL elsewhere: Intel's have all kernels of MKL, and without
    AVX-512 both libraries are equally fast. It never depends on a measurement, so that a run repeats.
    """
    if wanted != "auto":
        return wanted
    return "onednn" if _is_amd_with_avx512() and torch.backends.mkldnn.is_available() else "mkl"


def library_fault(wanted: CpuMatmul) -> str | None:
    """Why this setting cannot be used here; None if it can."""
    if wanted != "onednn" or (torch.backends.mkldnn.is_available() and hasattr(torch.library, "get_kernel")):
        return None
    return "this build of PyTorch has no oneDNN. Set mkl or auto"


def active_library() -> Literal["mkl", "onednn"]:
    """The library that computes large float32 products in this process now."""
    return _library


def use_library(name: Literal["mkl", "onednn"]) -> None:
    """Compute float32 products of this process by this library from now on; a forked process inherits it."""
    global _library
    _library = name
    _settle()


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Within, products with the weights of linear layers use a copy in oneDNN's own order: of float32 weights while
    oneDNN computes their products, of bfloat16 weights wherever it has kernels for them.

    The weights must not change within. With few rows, as in decoding, a product is limited by reading the weights,
    which is faster in that order. Costs one copy of the weights in memory.
    """
    added = []
    for module in model.modules():
        weight = _whole_weight(module)
        if weight is not None and (key := _key(weight.t())) not in _packed:
            _packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            added.append(key)
    _settle()
    try:
        yield
    finally:
        for key in added:
            del _packed[key]
        _settle()


def packs(dtype: torch.dtype, library: Literal["mkl", "onednn"]) -> bool:
    """Whether `packed_weights` packs weights of this dtype while this library computes float32 products."""
    if dtype is torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32 and library == "onednn"


def _settle() -> None:
    """Register our kernels if something needs them."""
    global _override
    is_needed = _library == "onednn" or bool(_packed)
    if is_needed and _override is None:
        _override = _registered()
    elif not is_needed and _override is not None:
        _override._destroy()
        _override = None


def _whole_weight(module: nn.Module) -> Tensor | None:
    """The weight of a linear layer that is worth packing, on this process; None for others."""
    weight: Any = getattr(module, "weight", None) if isinstance(module, nn.Linear) else None
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor or weight.device.type != "cpu":
        return None
    is_packed = packs(weight.dtype, _library) and weight.is_contiguous()
    return weight if is_packed and weight.numel() * 1024 >= SMALL else None  # others never meet enough rows


def _key(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), tuple(x.shape), x.stride()


def _registered() -> Any:
    """Kernels of `aten::mm` and `aten::addmm` for the CPU, in front of PyTorch's own, which they call for the rest."""
    plain_mm = torch.library.get_kernel("aten::mm", "CPU")
    plain_addmm = torch.library.get_kernel("aten::addmm", "CPU")

    def mm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
        if (product := _product(a, b, None)) is not None:
            return product
        return plain_mm.call_boxed(keys, a, b)

    def addmm(keys: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        is_bias = bias.dtype is a.dtype and bias.is_contiguous() and bias.shape == b.shape[1:]
        if beta == 1 and alpha == 1 and is_bias and (product := _product(a, b, bias)) is not None:
            return product
        return plain_addmm.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("mm", mm, "CPU", with_keyset=True, allow_override=True)
        library.impl("addmm", addmm, "CPU", with_keyset=True, allow_override=True)
    return library


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
    """a @ b + bias, [M K] [K N] -> [M N], by oneDNN; None where the product is left to PyTorch."""
    if a.dtype is not b.dtype or a.dim() != 2 or b.dim() != 2:
        return None
    (rows, inner), (also, columns) = a.shape, b.shape
    work = rows * inner * columns
    if inner != also:
        return None
    is_large = inner * columns >= PACKED_WEIGHT or work >= SMALL
    if _packed and is_large and (weight := _packed.get(_key(b))) is not None:
        return _linear(a, weight, bias, "none", [], "")
    if _library == "mkl" or a.dtype is not torch.float32 or work < SMALL or not (_is_matrix(a) and _is_matrix(b)):
        return None
    if bias is None and a.stride(0) == 1 and b.stride(1) == 1 and rows > columns:
        # The gradient of a weight. oneDNN copies a transposed first operand: let it be the smaller one.
        return _linear(b.t(), a, None, "none", [], "").t()
    return _linear(a, b.t(), bias, "none", [], "")


def _is_matrix(x: Tensor) -> bool:
    """Whether one dimension is contiguous and rows, or columns, do not overlap."""
    first, second = x.stride()
    return (second == 1 and first >= x.shape[1]) or (first == 1 and second >= x.shape[0])


@lru_cache(maxsize=1)
def _is_amd_with_avx512() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in text and " avx512f" in text
