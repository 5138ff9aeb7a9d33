"""The number of CPU threads of torch within a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Context in which torch uses this number of CPU threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    set_threads = torch._C.set_num_threads  # an engine may put a function that does nothing in the place of torch's
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)
