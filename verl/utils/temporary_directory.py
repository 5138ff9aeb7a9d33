"""Temporary directories that are removed even if their process is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from verl.utils.orphan_cleanup import CLEANUP


class TemporaryDirectory:
    """`tempfile.TemporaryDirectory`, removed by the clean-up process where this one is killed.

    Args:
        prefix: of its name.
        directory: where it is made; by default that for temporary files.
    Attributes:
        name: its path.
    """

    def __init__(self, prefix: str = "verl-", directory: str | Path | None = None):
        parent = tempfile.gettempdir() if directory is None else str(directory)
        self.name = os.path.join(os.path.abspath(parent), f"{prefix}{secrets.token_hex(6)}")
        number = CLEANUP.register(directories=[self.name])  # before it is made
        self._finalizer = weakref.finalize(self, _remove, self.name, number)
        os.mkdir(self.name, 0o700)

    def cleanup(self) -> None:
        """Remove it with all that is in it; may be called again."""
        self._finalizer()

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


def unwritable(directory: Path) -> str | None:
    """Why nothing can be written to a directory, or it cannot be made; None where it can. Leaves nothing."""
    try:
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        if not there.is_dir():
            return f"{there} is not a directory"
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"it cannot be written ({error.strerror or error})"


def _remove(directory: str, number: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    CLEANUP.withdraw(number)
