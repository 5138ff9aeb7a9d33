"""Main memory: what is free, and what the C library keeps of freed tensors. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of this container
_log = logging.getLogger(__name__)


def free_main_memory() -> int | None:
    """Bytes of main memory that this machine and this container's limit leave free; None if unknown. What holds files
    alone counts as free."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used, parts = ((CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        counts = dict(line.split() for line in parts.splitlines())
        files = int(counts["active_file"]) + int(counts["inactive_file"])
        return min(free, int(limit) - int(used) + files) if limit.strip() != "max" else free
    except (OSError, KeyError, ValueError):
        return free


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h
MOST_MAPPED, MAPPED_BYTES = 65536, 2**20  # where freed memory is not kept: blocks from this size on are mapped
LOW_SHARE = 0.2  # of the memory that was free at first: below it freed memory is kept no longer
POLL_INTERVAL_S = 0.25
_watched_in: int | None = None  # process whose memory is kept


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones, where it is glibc.

    By default a large block is mapped anew for each tensor, and the system clears it page by page: a third of the
    processor time of an update. But glibc before 2.38 does not reuse the place of a freed tensor for one of the same
    size, so that a process keeps up to twice the memory of its tensors. So when memory becomes scarce what is kept is
    returned, and nothing is kept from then on. `give_back` returns it too.
    """
    global _watched_in
    free = free_main_memory()
    if _watched_in == os.getpid() or free is None:
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        _watched_in = os.getpid()
        threading.Thread(target=_give_back_when_scarce, args=(int(LOW_SHARE * free),), daemon=True).start()


def _give_back_when_scarce(least: int) -> None:
    """Keep freed memory no longer once less than so many bytes are free on this machine."""
    while (free := free_main_memory()) is None or free >= least:
        time.sleep(POLL_INTERVAL_S)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, MOST_MAPPED)
    mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    give_back()
    _log.warning(
        "Only %.1f GiB of main memory are free: freed memory is returned at once from here on, which costs up to a "
        "third of the speed. Lower micro_batch_tokens or rollout.max_rows.", free / 2**30,
    )  # fmt: skip


def give_back() -> None:
    """Return freed memory that allocators keep to the operating system; takes a few milliseconds.

    glibc and Arrow keep freed memory, so that resident memory exceeds usage.
    """
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
