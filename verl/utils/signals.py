"""Signals: the first SIGINT or SIGTERM finishes and saves the current step; the second one ends the run at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from verl.utils.component_exits import note_interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """The run was ended by SIGTERM, as a scheduler sends it, and not by a person."""


def interruption(number: int | None) -> KeyboardInterrupt:
    """What ends a run that was asked to stop by this signal."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt, so that all is closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Whether and why the run was asked to stop.

    Attributes:
        signal: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take SIGINT and SIGTERM within; outside the main thread, where no signal arrives, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Any] = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            note_interrupt()
        if self.signal is not None:
            raise interruption(number)
        self.signal = number
        again = "; Ctrl-C again stops at once, and loses that step" if number == signal.SIGINT else ""
        text = f"{signal.Signals(number).name}: stopping once this step is done and saved{again}\n"
        with contextlib.suppress(OSError):
            # Past all buffers: the signal may have come while one of them was written, and they bear no second writer.
            os.write(2, text.encode())

    _take.notes_interrupts = True  # type: ignore[attr-defined]
