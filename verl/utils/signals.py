"""Ends of a run: signals from outside, and `exit()` in component code, which becomes an error that names the line.

The first SIGINT, SIGTERM or SIGHUP finishes and saves the current step; the second one ends the run.

    with component_exits():     exit(), sys.exit(n) ──> ComponentExit
        trainer.fit()           Ctrl-C, SIGTERM     ──> unchanged

Components are rewards, data sets, trackers, models and all other code outside of verl that a run calls. If a component
may fail without ending the run, as a tracker may, its exit counts as such a failure.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from verl.errors import ComponentExit

RAISED_BY_CODE = (Exception, SystemExit)  # what code of a component raises; Ctrl-C and SIGTERM are not among them
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))


def as_component_exit(error: BaseException) -> ComponentExit:
    """Make the error that names the line which called exit."""
    location, line = _location(error.__traceback__)
    code = getattr(error, "code", None)
    return ComponentExit(
        f"{location} raised SystemExit({'' if code is None else repr(code)}){f': {line}' if line else ''}\n"
        "  A component must not end the program. Let it raise an error with a message, or return."
    )


class component_exits(contextlib.ContextDecorator):
    """Inside this context an exit of a component is raised as `ComponentExit`. Contexts may be nested.

    Args:
        directly: also convert an exit of the body itself, not only of code that verl calls in it.
    """

    def __init__(self, directly: bool = True):
        self._directly = directly

    def __enter__(self) -> component_exits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and (self._directly or _passed_through_verl(trace)):
            raise as_component_exit(error) from error


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _passed_through_verl(trace: TracebackType | None) -> bool:
    """Whether the traceback leads from the body through verl to the code that raised."""
    return any(frame.filename.startswith(_PACKAGE) for frame in traceback.extract_tb(trace)[2:])


def _location(trace: TracebackType | None) -> tuple[str, str]:
    """The innermost frame outside of the interpreter and verl, and its line; if there is none, the innermost."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return "a component", ""
    frame = next((frame for frame in reversed(frames) if _is_of_component(frame.filename)), frames[-1])
    name = "the module" if frame.name == "<module>" else f"{frame.name}()"
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{name} at line {frame.lineno} of {frame.filename}", line


def _is_of_component(file: str) -> bool:
    if file.startswith(("<", _PACKAGE)):
        return False
    if file == getattr(getattr(sys.exit, "__code__", None), "co_filename", None):
        return False  # a library has replaced the function, as W&B does
    return not file.startswith(_STANDARD) or file.startswith(_INSTALLED)


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
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, a handler takes these signals; outside the main thread, where no signal arrives, nothing changes."""
    if not _is_main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise `Terminated`, as Ctrl-C raises KeyboardInterrupt, so that all is closed in
    order.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _leave_closed_terminal()
        if number == signal.SIGHUP:  # shell and kernel each send one when a terminal is closed
            signal.signal(number, lambda *_: None)
        raise Terminated(number)

    with _handled(termination_signals(), end):
        yield


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: the process ends, and a further one would only add a traceback."""
    if _is_main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave_closed_terminal() -> None:
    """Discard output to a closed terminal, because a failing write would end the run before it is saved."""
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
        with _handled((signal.SIGINT, *termination_signals()), self._take):
            yield self

    def _take(self, number: int, frame: FrameType | None) -> None:
        before, self.signal = self.signal, self.signal or number  # at once: a further signal may interrupt what follows
        _leave_closed_terminal()
        if before is not None:
            if number == signal.SIGHUP:  # shell and kernel each send one when a terminal is closed
                return
            raise interruption(number)
        again = "; Ctrl-C again stops at once, and loses that step" if number == signal.SIGINT else ""
        text = f"{signal.Signals(number).name}: stopping once this step is done and saved{again}\n"
        with contextlib.suppress(OSError):
            # Past all buffers: the signal may have come while one of them was written, and they bear no second writer.
            os.write(2, text.encode())
