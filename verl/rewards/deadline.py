"""Deadlines for calls of user code in this process; the error names the line at which the call was interrupted.

main thread     a signal (SIGURG, ignored by default) raises an exception in the call, again every second;
                if a call inside a library never returns to Python, the process ends with a message
other threads   the call runs in a separate thread, which is abandoned
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

Value = TypeVar("Value")
BATCH_TIMEOUT_S = 60.0  # default for a call that scores a whole batch
REPEATED_S, GRACE_S = 1.0, 60.0
STACK_LINES = 4
log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A call failed in another process, or passed its deadline in this one."""


class _Late(BaseException):
    """Raised in a call past its deadline. A BaseException, so that `except Exception` in user code does not catch
    it."""


def call_within(timeout_s: float, call: Callable[[], Value], file: str | None = None) -> Value:
    """Return the result of a call.

    Args:
        timeout_s: deadline in seconds.
        call: the function.
        file: source file of the user; the error names the innermost line in it.
    Raises:
        CallFailed: it did not return in time.
    """
    if threading.current_thread() is not threading.main_thread():
        return in_thread(call, timeout_s, file)
    try:
        with _interrupted(timeout_s):
            return call()
    except _Late as late:
        raise CallFailed(_words(timeout_s, traceback.extract_tb(late.__traceback__), file)) from None


def in_thread(call: Callable[[], Value], timeout_s: float | None = None, file: str | None = None) -> Value:
    """Equivalent of `call_within` in a daemon thread; None for no deadline."""
    results: list[Any] = []
    failed: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            results.append(context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=run, name="reward call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not results:
        frame = sys._current_frames().get(thread.ident or 0)
        raise CallFailed(_words(timeout_s or 0.0, traceback.extract_stack(frame) if frame else [], file))
    return results[0]


def awaited(result: Any) -> Any:
    """Await a coroutine, or a list of coroutines concurrently; anything else is returned unchanged."""
    is_single = inspect.isawaitable(result)
    items: list = [result] if is_single else list(result) if isinstance(result, (list, tuple)) else []
    if not any(map(inspect.isawaitable, items)):
        return result

    async def value(item: Any) -> Any:
        return await item if inspect.isawaitable(item) else item

    async def every() -> Any:
        values = await asyncio.gather(*map(value, items))
        return values[0] if is_single else values

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(every())
    return in_thread(lambda: asyncio.run(every()))  # in a notebook, whose loop already runs in this thread


@contextmanager
def _interrupted(timeout_s: float) -> Iterator[None]:
    over, main = threading.Event(), threading.main_thread().ident
    assert main is not None, "the main thread runs"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not over.is_set():
            raise _Late

    def watch() -> None:
        wait_s, last = timeout_s, time.monotonic() + timeout_s + GRACE_S
        while not over.wait(wait_s):
            if time.monotonic() > last:
                _end_process(timeout_s, main)
            signal.pthread_kill(main, signal.SIGURG)
            wait_s = REPEATED_S

    before = signal.signal(signal.SIGURG, interrupt)
    threading.Thread(target=watch, name="reward deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGURG, signal.SIG_DFL if before is None else before)


def _end_process(timeout_s: float, thread: int) -> None:
    frame = sys._current_frames().get(thread)
    stack = "" if frame is None else "".join(traceback.format_stack(frame)[-STACK_LINES:])
    words = (
        f"The reward function has not returned for {timeout_s + GRACE_S:g} s (reward.timeout_s is {timeout_s:g}) and "
        f"cannot be interrupted, since it is inside a library. The run ends here, unfinished. The call is at:\n{stack}"
    )
    log.critical("%s", words)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.write(2, words.encode())
    os._exit(1)


def _words(timeout_s: float, frames: list[traceback.FrameSummary], file: str | None) -> str:
    user_frames = [frame for frame in frames if frame.filename == file]
    where = f"\n  It was at line {user_frames[-1].lineno}: {user_frames[-1].line}".rstrip(": ") if user_frames else ""
    return f"no answer within {timeout_s:g} s (reward.timeout_s){where}"
