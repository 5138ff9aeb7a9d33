"""Exits of components: what a component raises to end the whole program becomes an error that names the line.

    with component_exits():     exit(), sys.exit(n), os._exit(n), KeyboardInterrupt without Ctrl-C ──> ComponentExit
        trainer.fit()           Ctrl-C, SIGTERM                                                    ──> as they are

Components are rewards, data sets, trackers, models and all other code that a run calls and that is not its own. Where
one of them may fail without ending the run, as a tracker may, its exit is such a failure too: see `raised_by_code`.
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
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from verl.errors import ComponentExit

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))


class OsExit(SystemExit):
    """`os._exit` was called within `component_exits`."""


class _Process:
    """Of this process: open `component_exits`, whether Ctrl-C has come, and what the outermost one replaced."""

    depth = 0
    was_interrupted = False
    own_exit: Callable[[int], NoReturn] = os._exit
    owner = 0
    before: Any = None


def note_interrupt() -> None:
    """SIGINT has come: a KeyboardInterrupt is one from here on. For handlers, which carry `notes_interrupts = True`."""
    _Process.was_interrupted = True


def raised_by_code(error: BaseException) -> bool:
    """Whether code raised it, and not a person or a scheduler who wants the run to end.

    >>> try:
    ...     tracker.log(metrics)
    ... except BaseException as error:
    ...     if not raised_by_code(error):
    ...         raise
    """
    if isinstance(error, (Exception, SystemExit)):
        return True
    if type(error) is not KeyboardInterrupt:
        return False
    if not _is_main_thread():
        return True  # signals reach the main thread alone
    if _Process.was_interrupted:
        return False
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.SIG_IGN or getattr(handler, "notes_interrupts", False)


def as_component_exit(error: BaseException) -> ComponentExit:
    """The error that says which line wanted to end the program."""
    place, line = _place(error.__traceback__)
    if isinstance(error, OsExit):
        raised = f"called os._exit({error.code})"
    elif isinstance(error, SystemExit):
        raised = f"raised SystemExit({'' if error.code is None else repr(error.code)})"
    else:
        raised = "raised KeyboardInterrupt, and nobody had pressed Ctrl-C"
    shown = f": {line}" if line else ""
    return ComponentExit(
        f"{place} {raised}{shown}\n  A component does not end the program. Let it raise an error that says what is "
        "wrong, or return."
    )


class component_exits(contextlib.ContextDecorator):
    """Within, what a component raises to end the program is raised as `ComponentExit`; may be nested.

    `os._exit`, which would end the process at once, with whatever it is given and nothing closed, raises in the main
    thread as `sys.exit` does; in another thread it still ends the process, but in words and with a status other than 0.

    Args:
        directly: also where the body itself raised, not only code that verl has called for it.
    """

    def __init__(self, directly: bool = True):
        self._directly = directly

    def __enter__(self) -> component_exits:
        state = _Process
        state.depth += 1
        if state.depth == 1:
            state.was_interrupted, state.owner, state.before = False, os.getpid(), None
            state.own_exit, os._exit = os._exit, _exit  # type: ignore[assignment]
            if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                state.before = signal.signal(signal.SIGINT, _interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_exit = error is not None and not isinstance(error, Exception) and raised_by_code(error)
        state = _Process
        state.depth -= 1
        if state.depth == 0:
            os._exit = state.own_exit  # type: ignore[assignment]
            if state.before is not None and signal.getsignal(signal.SIGINT) is _interrupt:
                signal.signal(signal.SIGINT, state.before)
        if is_exit and error is not None and (self._directly or _passed_through_verl(trace)):
            raise as_component_exit(error) from error


def _interrupt(number: int, frame: FrameType | None) -> None:
    note_interrupt()
    signal.default_int_handler(number, frame)


_interrupt.notes_interrupts = True  # type: ignore[attr-defined]


def _exit(status: int) -> NoReturn:
    """In the place of `os._exit`."""
    own_exit = _Process.own_exit
    if os.getpid() != _Process.owner:  # a forked child, whose way to end this is
        own_exit(status)
    if _is_main_thread():
        raise OsExit(status)
    found = [one for one in traceback.extract_stack()[:-1] if _is_of_component(one.filename)]
    where = f"line {found[-1].lineno} of {found[-1].filename}" if found else "a component"
    with contextlib.suppress(OSError):
        os.write(2, f"{where} called os._exit({status}) in a thread: the run ends here, unfinished\n".encode())
    own_exit(status or 1)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _passed_through_verl(trace: TracebackType | None) -> bool:
    """Whether the body, whose own frames come first, had called verl, and verl what raised."""
    return any(frame.filename.startswith(_PACKAGE) for frame in traceback.extract_tb(trace)[2:])


def _place(trace: TracebackType | None) -> tuple[str, str]:
    """The innermost place that is neither the interpreter's own code nor verl's, and its line; else the innermost."""
    frames = traceback.extract_tb(trace)
    frame = next((one for one in reversed(frames) if _is_of_component(one.filename)), frames[-1] if frames else None)
    if frame is None:
        return "a component", ""
    name = "the module" if frame.name == "<module>" else f"{frame.name}()"
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{name} at line {frame.lineno} of {frame.filename}", line


def _is_of_component(file: str) -> bool:
    if file.startswith(("<", _PACKAGE)):
        return False
    if file == getattr(getattr(sys.exit, "__code__", None), "co_filename", None):
        return False  # a library has put a function of its own there, as W&B does, and this is that
    return not file.startswith(_STANDARD) or file.startswith(_INSTALLED)
