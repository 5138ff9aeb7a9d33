"""Deadlines of calls, which count only time in which the event loop ran: what the trainer does late is not late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

LOOK_S = 0.25
MAX_ERROR = 600  # characters of the error in the record of a call


class DeadlinePassed(TimeoutError):
    """A call took longer than it may."""

    def __init__(self, timeout_s: float):
        super().__init__(f"no answer within {timeout_s:g} s")


async def within(timeout_s: float, awaitable: Awaitable[Any]) -> Any:
    """Await a result for at most `timeout_s`, and cancel the rest.

    A wait that ends much later than it should is not counted: the process was suspended meanwhile, or another thread
    or callback of it kept the event loop from running.

    Raises:
        DeadlinePassed: there is no result.
    """
    task, left_s = asyncio.ensure_future(awaitable), timeout_s
    try:
        while left_s > 0:
            begin, pause_s = time.monotonic(), min(left_s, LOOK_S)
            await asyncio.wait((task,), timeout=pause_s)
            if task.done():
                return task.result()
            took_s = time.monotonic() - begin
            if took_s < pause_s + LOOK_S:
                left_s -= took_s
        raise DeadlinePassed(timeout_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=LOOK_S)
