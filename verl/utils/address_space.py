"""The limit of a process's address space (`ulimit -v`), as batch systems set it, and errors that it explains."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from verl.errors import ConfigError, root_cause

LEAST_BYTES = 3 * 2**29  # a run of the built-in model fails below 1.4 GiB, and PyTorch alone maps 1.1
NEAR = 0.25  # share of the limit: the largest block that is requested at once is smaller


def refuse_small_address_space() -> None:
    """Refuse a limit below which the libraries end the process themselves, without a Python error.

    Raises:
        ConfigError: the limit is below `LEAST_BYTES`.
    """
    limit = _limit()
    if limit is not None and limit < LEAST_BYTES:
        raise ConfigError(
            f"The address space of this process is limited to {limit / 2**30:.2f} GiB (`ulimit -v`): PyTorch and its "
            f"libraries need {LEAST_BYTES / 2**30:.1f} GiB before a model is loaded. Raise the limit, or limit the "
            "memory by other means (`systemd-run -p MemoryMax=`, a container)."
        )


def out_of_memory_message(error: BaseException) -> str | None:
    """Message for an error that a lack of memory explains; None for other errors.

    Libraries report a refused allocation by errors of their own, such as `could not create a primitive` or `can't start
    new thread`; these count if the process has used most of its address space.
    """
    limit, cause = _limit(), root_cause(error)
    is_plain = isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
    is_near = limit is not None and _peak() > (1 - NEAR) * limit and isinstance(cause, (RuntimeError, OSError))
    if not (is_plain or is_near):
        return None
    said = "" if isinstance(cause, MemoryError) else f" ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})"
    if limit is None:
        return f"The memory of this process is used up{said}: give it more, or use a smaller run."
    return (
        f"The memory of this process is used up{said}: its address space is limited to {limit / 2**30:.2f} GiB "
        f"(`ulimit -v`), of which {_peak() / 2**30:.2f} GiB were used. Raise the limit, or use a smaller run."
    )


def _limit() -> int | None:
    """The limit in bytes; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _peak() -> int:
    """The most address space that the process has had, in bytes; 0 where the system does not tell."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in text.splitlines() if line.startswith("VmPeak:")]
    return int(lines[0][1]) * 1024 if lines else 0
