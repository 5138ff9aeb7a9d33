"""Directory of compiled kernels of torch, in the cache of verl instead of TMPDIR, where runs leave no files.

The default of torch is `torchinductor_USER` in TMPDIR, created by each process that imports it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def kernel_cache_directory() -> Path | None:
    """The directory set by the user, else one in VERL_CACHE or ~/.cache/verl; None if it is not writable."""
    directory = os.environ.get(VARIABLE)
    if directory and Path(directory).parent != Path(tempfile.gettempdir()).absolute():  # torch sets the variable too
        return Path(directory)
    return cache_directory("torchinductor")


def cache_directory(name: str) -> Path | None:
    """A directory in VERL_CACHE or ~/.cache/verl; None if it is not writable."""
    directory = Path(os.environ.get("VERL_CACHE") or Path.home() / ".cache" / "verl").expanduser() / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


def set_kernel_cache() -> None:
    """Set the directory for this process and its children."""
    if (directory := kernel_cache_directory()) is not None:
        os.environ[VARIABLE] = str(directory)
