"""Where torch keeps the kernels that it compiles: beside verl's other caches, not in TMPDIR, where runs leave nothing.

torch's own default is `torchinductor_USER` in TMPDIR, made by each process that imports it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def kernel_cache_directory() -> Path | None:
    """The directory that the user has set; otherwise in VERL_CACHE or ~/.cache/verl; None if it cannot be written."""
    found = os.environ.get(VARIABLE)
    if found and Path(found).parent != Path(tempfile.gettempdir()).absolute():  # torch sets the variable too
        return Path(found)
    directory = Path(os.environ.get("VERL_CACHE") or Path.home() / ".cache" / "verl").expanduser() / "torchinductor"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


def set_kernel_cache() -> None:
    """Have this process and its children use it."""
    if (directory := kernel_cache_directory()) is not None:
        os.environ[VARIABLE] = str(directory)
