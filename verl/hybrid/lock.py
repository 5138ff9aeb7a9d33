"""One call at a time: an actor's model has one state, and its engine one set of options."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl.errors import ActorBusy


class ActorLock:
    """Held by the thread that is in a call; calls within that call, of the same thread, go on."""

    def __init__(self):
        self._lock = threading.RLock()
        self._holder: tuple[str, str, float] | None = None  # thread, call, since when

    @contextmanager
    def held(self, call: str, timeout_s: float) -> Iterator[None]:
        """Within, no other thread is.

        Raises:
            ActorBusy: another thread was in a call all this time; names both calls.
        """
        began = time.monotonic()
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise ActorBusy(self._told(call, began))
        outer, self._holder = self._holder, (threading.current_thread().name, call, time.monotonic())
        try:
            yield
        finally:
            self._holder = outer
            self._lock.release()

    def _told(self, call: str, began: float) -> str:
        now, by = time.monotonic(), "another thread"
        if self._holder is not None:
            thread, theirs, since = self._holder
            by = f"thread {thread}, in actor.{theirs} for {now - since:.0f} s"
        return (
            f"actor.{call} of thread {threading.current_thread().name} has waited {now - began:.0f} s for {by}. An "
            "actor does one call at a time: raise hybrid_config.busy_timeout_s, or give each thread its own actor."
        )
