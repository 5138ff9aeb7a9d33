"""An event loop in a thread of its own: code that waits for many answers, called from code that knows no asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.errors import ComponentHung
from verl.utils.progress import Progress, ProgressWatch

T = TypeVar("T")

END_TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0


class Background:
    """Runs coroutines; the thread is started by the first and ended by `close`."""

    def __init__(self, name: str):
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine, and return at once."""
        if self._loop is None:
            self._loop, self._turns = asyncio.new_event_loop(), Progress(num_slots=1)
            # A daemon, so that a call in it that never returns cannot keep the process alive.
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, future: Future[T], timeout_s: float | None = None, stuck_s: float | None = None) -> T:
        """What a coroutine returns. An exception in the caller, such as Ctrl-C's, cancels it.

        Args:
            stuck_s: how long code in the loop may keep it from everything else, time limits of its own included.
        Raises:
            TimeoutError: it has not returned in time.
            ComponentHung: code in the loop does not come back; names its line.
        """
        try:
            return future.result(timeout_s) if stuck_s is None else self._watched(future, stuck_s)
        except BaseException:
            future.cancel()
            raise

    def _watched(self, future: Future[T], stuck_s: float) -> T:
        look_every_s = min(LOOK_EVERY_S, stuck_s)
        watch = ProgressWatch(self._turns, stuck_s, look_every_s=2 * look_every_s)
        while True:
            assert self._loop is not None
            assert self._thread is not None
            self._loop.call_soon_threadsafe(self._turns.advance)
            concurrent.futures.wait([future], timeout=look_every_s)
            if future.done() or not self._thread.is_alive():
                return future.result(END_TIMEOUT_S)
            if watch.is_overdue:
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)[-4:])
                raise ComponentHung(f"code in the thread {self._name!r} has not returned for {stuck_s:g} s:\n{stack}")

    def close(self) -> None:
        """Cancel what still runs, and end the thread; one that hangs in code of the user is left behind."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)
        if not self._thread.is_alive():
            self._turns.close()
        self._loop = self._thread = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
