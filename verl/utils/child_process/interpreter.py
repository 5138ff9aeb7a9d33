"""Faster start and end of Python processes that import torch and transformers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from verl.errors import OutputFailed

RARELY = 200_000  # objects made and not freed between two garbage collections; Python's default is 700


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Inside this context garbage collection is rare, to speed up imports and building a trainer.

    torch and transformers create 700,000 objects, of which almost none is garbage, and scanning them repeatedly takes a
    fifth of the import time.
    """
    before = gc.get_threshold()
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def exit_without_freeing(status: int = 0) -> NoReturn:
    """Exit like the interpreter, but without freeing every object.

    With torch and transformers that takes more than a second of CPU time, for which the parent would wait.
    """
    threading._shutdown()  # type: ignore[attr-defined] - waits for threads that are not daemons
    atexit._run_exitfuncs()
    flush_open_files()
    os._exit(status)


def flush_open_files() -> None:
    """Flush all open files, as the interpreter does at exit."""
    for kind in (io.TextIOWrapper, io.BufferedIOBase):  # text is flushed to its buffer
        try:
            files = [item for item in gc.get_objects() if issubclass(type(item), kind)]
        except MemoryError:  # a list of all objects does not fit
            files = [sys.stdout, sys.stderr] if kind is io.TextIOWrapper else []
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                file.flush()


def run_main(main: Callable[[], object]) -> NoReturn:
    """Run `main` as a script and exit by `exit_without_freeing`."""
    status = 0
    try:
        try:
            main()
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                sys.stderr.write(f"{end.code}\n")
            status = 1 if not isinstance(end.code, int | None) else (end.code or 0) & 0xFF
        sys.stdout.flush()
    except OutputFailed as error:
        if not status:  # else the command has told it
            sys.stderr.write(f"error: {error}\n")
            status = 2
    except BrokenPipeError:  # which the interpreter reports
        sys.exit(status)
    exit_without_freeing(status)
