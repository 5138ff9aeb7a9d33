"""Logging of a run to the console and to run.log in the run directory, with secrets redacted."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from verl.tracking.console import print_line
from verl.utils.redact import RedactSecrets

IN_RUN_LOG = "is_in_run_log"  # attribute of an error whose traceback was logged
REPEATS_SHOWN, REPEATS_WITHIN_S = 5, 60.0
_NAME = "verl run"  # name of the handlers installed here
_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup_logging(run_dir: Path | str | None) -> Callable[[], None]:
    """Send what verl logs to the console and to `run_dir/run.log`.

    The file gets everything from INFO upwards, including the lines that the console tracker prints itself. Propagation
    to the root logger, whose handlers would print a second time, is off meanwhile. A nested call replaces the handlers
    until it is undone, so no line is written twice.

    Args:
        run_dir: created if missing; None for no file.
    Returns:
        A function that restores the previous handlers and closes the file; calling it again does nothing.
    Raises:
        OSError: run.log cannot be written.
    """
    logger = logging.getLogger("verl")
    file = None if run_dir is None else Path(run_dir) / "run.log"
    handlers: list[logging.Handler] = [_ConsoleLines(file)]
    if run_dir is not None:
        handlers.append(_file_lines(Path(run_dir)))
    level, propagate = logger.level, logger.propagate
    replaced = [handler for handler in logger.handlers if handler.name == _NAME]
    for handler in handlers:
        handler.name = _NAME
        handler.addFilter(RedactSecrets())
    _exchange(logger, replaced, handlers)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def undo() -> None:
        if handlers[0] in logger.handlers:
            _exchange(logger, handlers, replaced)
            logger.setLevel(level)
            logger.propagate = propagate
        for handler in handlers:
            handler.close()

    return undo


def _exchange(logger: logging.Logger, out: list[logging.Handler], new: list[logging.Handler]) -> None:
    for handler in out:
        logger.removeHandler(handler)
    for handler in new:
        logger.addHandler(handler)


def _file_lines(run_dir: Path) -> logging.FileHandler:
    run_dir.mkdir(parents=True, exist_ok=True)
    handler = _RunLog(run_dir / "run.log", encoding="utf-8", errors="backslashreplace")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(_FILE_FORMAT))
    return handler


class _RunLog(logging.FileHandler):
    """A log file that survives a full disk: reported once, and lines wait in memory for space."""

    _has_warned = False

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            logging.getLogger(__name__).warning("run.log cannot be written, training goes on: %s", error)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _WithoutTraceback(logging.Formatter):
    """Formats messages without traceback, which is in run.log and, if the error ends the run, printed at the end."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_info = record.exc_text = record.stack_info = None
        return super().format(record)


class _ConsoleLines(logging.Handler):
    """Prints through the console of the progress bar, so that lines appear above the bar.

    Messages that differ in numbers only, such as one for each of 500 episodes, are shown `REPEATS_SHOWN` times in
    `REPEATS_WITHIN_S` seconds; the rest are counted.
    """

    def __init__(self, file: Path | None = None):
        super().__init__(logging.INFO)
        self.setFormatter(_WithoutTraceback("%(levelname)s %(message)s"))
        self._where = "not shown" if file is None else f"in {file}"
        self._repeats: dict[tuple[Any, ...], tuple[float, int]] = {}  # since when, and how many
        self._hidden = 0

    def filter(self, record: logging.LogRecord) -> bool:
        shown_already = not getattr(record, "console", True)
        if shown_already or self._is_repeated(record):  # before secrets are redacted, which drops the arguments
            self._hidden += not shown_already
            return False
        return bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        self._tell_hidden()
        try:
            self._print(self.format(record), "bold red" if record.levelno >= logging.WARNING else "")
        except Exception:  # noqa: BLE001 - as handlers of the standard library do
            self.handleError(record)

    def close(self) -> None:
        self._tell_hidden()
        super().close()

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        texts = tuple(str(x) for x in arguments if not isinstance(x, (int, float)))
        if not texts or len(texts) == len(arguments):
            return False
        key = (record.name, record.levelno, record.msg, texts)
        since, count = self._repeats.get(key, (record.created, 0))
        if record.created - since > REPEATS_WITHIN_S:
            since, count = record.created, 0
        self._repeats[key] = since, count + 1
        return count >= REPEATS_SHOWN

    def _tell_hidden(self) -> None:
        hidden, self._hidden = self._hidden, 0
        if hidden:
            self._print(f"({hidden} more lines like these are {self._where})", "")

    def _print(self, line: str, style: str) -> None:
        import rich

        with contextlib.suppress(OSError):  # a closed pipe or a full disk
            print_line(rich.get_console(), line, style)
