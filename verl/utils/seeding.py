"""Seeds: every random number of a run derives from one integer and a name for its purpose."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
RngState = tuple[dict[str, "torch.Tensor"], dict[str, Any]]  # tensors by name, and the rest as plain JSON values


def derive_seed(seed: int, *names: object) -> int:
    """A seed in [0, 2^63) for one named use; equal on every machine and independent of every other name."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and demand deterministic kernels.

    Backward passes of indexing are not deterministic without the last part; see torch.use_deterministic_algorithms.
    On a GPU an operation that has no deterministic form raises. If it only warned, the backward pass of attention would
    take its faster kernel, which is not deterministic.
    """
    import numpy as np
    import torch

    os.environ.setdefault(*CUBLAS_WORKSPACE)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Filling every new tensor with NaN finds reads of memory that nothing wrote, and makes nothing deterministic.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def rng_state() -> RngState:
    """The state of every global generator of this process."""
    import numpy as np
    import torch

    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # by this process, on its own GPU: a look at another one would open a context there
        tensors[f"cuda_{torch.cuda.current_device()}"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    plain = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    return tensors, plain


def set_rng_state(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    """Restore the result of `rng_state`. A process without a GPU ignores GPU states; one that uses another GPU than
    before restores the only GPU state."""
    import numpy as np
    import torch

    torch.set_rng_state(tensors["torch"])
    of_gpus = {name: state for name, state in tensors.items() if name.startswith("cuda_")}
    if of_gpus and torch.cuda.is_initialized():
        device_key = f"cuda_{torch.cuda.current_device()}"
        if device_key in of_gpus or len(of_gpus) == 1:
            torch.cuda.set_rng_state(of_gpus.get(device_key, next(iter(of_gpus.values()))))
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *remaining = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *remaining))


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Within, code of others may draw from the global generators: afterwards they are as they were.

    For code that must not affect training, such as a tracker that samples rows. Modules that are not imported have no
    generator.
    """
    python = random.getstate()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    of_numpy = None if numpy is None else numpy.random.get_state()
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)
        if torch is not None and of_torch is not None:
            torch.set_rng_state(of_torch)
