"""Signals: the first SIGINT, SIGTERM or SIGHUP finishes and saves the current step; the second one ends the run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from verl.utils.component_exits import note_interrupt


class Terminated(KeyboardInterrupt):
    """The run was ended by SIGTERM, as a scheduler sends it, or by SIGHUP, as a terminal that is closed sends it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__()
        self.number = number


def interruption(number: int | None) -> KeyboardInterrupt:
    """Exception that ends a run that was asked to stop by this signal."""
    return KeyboardInterrupt() if number in (None, signal.SIGINT) else Terminated(number)


def termination_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGHUP; without SIGHUP if it is ignored, as under nohup."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise `Terminated`, as Ctrl-C raises KeyboardInterrupt, so that all is closed in
    order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        _leave_closed_terminal()
        if number == signal.SIGHUP:  # shell and kernel each send one when a terminal is closed
            signal.signal(number, lambda *_: None)
        raise Terminated(number)

    before = {number: signal.signal(number, end) for number in termination_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: the process ends, and a further one would only add a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave_closed_terminal() -> None:
    """Send output to a terminal that is gone nowhere; writing would fail, and end the run before it is saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


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
        """Take SIGINT, SIGTERM and SIGHUP within; outside the main thread, where no signal arrives, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = (signal.SIGINT, *termination_signals())
        before: dict[int, Any] = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        _leave_closed_terminal()
        if number == signal.SIGINT:
            note_interrupt()
        if self.signal is not None:
            if number == signal.SIGHUP:  # shell and kernel each send one when a terminal is closed
                return
            raise interruption(number)
        self.signal = number
        again = "; Ctrl-C again stops at once, and loses that step" if number == signal.SIGINT else ""
        text = f"{signal.Signals(number).name}: stopping once this step is done and saved{again}\n"
        with contextlib.suppress(OSError):
            # Past all buffers: the signal may have come while one of them was written, and they bear no second writer.
            os.write(2, text.encode())

    _take.notes_interrupts = True  # type: ignore[attr-defined]
