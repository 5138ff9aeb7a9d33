"""Start and end of a Python process that imports torch and transformers: both without seconds of needless work."""

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

RARELY = 200_000  # objects made and not freed between two garbage collections; Python's default is 700


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for garbage seldom while libraries are imported and a trainer is built.

    Of the 700,000 objects that torch and transformers bring, next to none is garbage, and looking through them again
    and again takes a fifth of the time of the imports.
    """
    before = gc.get_threshold()
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def exit_without_freeing(status: int = 0) -> NoReturn:
    """End this process as the interpreter does, but without freeing each object that was imported.

    With torch and transformers that takes more than a second of processor time, for which the parent would wait.
    """
    threading._shutdown()  # type: ignore[attr-defined] - waits for threads that are no daemons
    atexit._run_exitfuncs()
    flush_open_files()
    os._exit(status)


def flush_open_files() -> None:
    """Write what files that nobody has closed still hold in memory, as the interpreter does when it frees them."""
    for kind in (io.TextIOWrapper, io.BufferedIOBase):  # text goes to the buffer below it
        for file in [found for found in gc.get_objects() if issubclass(type(found), kind)]:
            with contextlib.suppress(OSError, ValueError):
                file.flush()


def run_main(main: Callable[[], object]) -> NoReturn:
    """Run `main` as the whole of a script and end the process, see `exit_without_freeing`."""
    status = 0
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            sys.stderr.write(f"{end.code}\n")
        status = 1 if not isinstance(end.code, int | None) else (end.code or 0) & 0xFF
    try:
        sys.stdout.flush()
    except OSError:  # such as a full disk, of which the interpreter tells
        sys.exit(status)
    exit_without_freeing(status)
