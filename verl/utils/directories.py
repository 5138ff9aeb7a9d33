"""Directories outside of a run's own: temporary ones, removed even if their process is killed, and the cache of verl.

Kernels that torch compiles are kept in the cache: its own default is `torchinductor_USER` in TMPDIR, created by each
process that imports it, while runs leave no files there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from verl.errors import ConfigError
from verl.utils.orphan_cleanup import CLEANUP

KERNEL_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


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
        there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
        if not there.is_dir():
            return f"{there} is {'a symbolic link to no directory' if there.is_symlink() else 'not a directory'}"
        longest = os.pathconf(there, "PC_NAME_MAX")
        if 0 < longest < max(len(os.fsencode(name)) for name in directory.absolute().parts):  # FUSE may not know it
            return f"it has a name of more than {longest} bytes"
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"it cannot be written ({error.strerror or error})"


def _remove(directory: str, number: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    CLEANUP.withdraw(number)


def kernel_cache_directory() -> Path | None:
    """The directory set by the user, else one in VERL_CACHE or ~/.cache/verl; None if it is not writable."""
    directory = os.environ.get(KERNEL_CACHE_VARIABLE)
    if directory and Path(directory).parent != Path(tempfile.gettempdir()).absolute():  # torch sets the variable too
        return Path(directory)
    return cache_directory("torchinductor")


def cache_root() -> Path:
    """`$VERL_CACHE`, by default `~/.cache/verl`.

    Raises:
        ConfigError: it is not set, and this user has no home directory.
    """
    try:
        return Path(os.environ.get("VERL_CACHE") or "~/.cache/verl").expanduser()
    except RuntimeError as error:
        raise ConfigError("VERL_CACHE is not set, and this user has no home directory. Set it.") from error


def cache_directory(name: str) -> Path | None:
    """A directory in `cache_root`; None if it is not writable."""
    try:
        directory = cache_root() / name
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ConfigError):
        return None
    return directory if os.access(directory, os.W_OK) else None


def set_kernel_cache() -> None:
    """Set the directory for this process and its children."""
    if (directory := kernel_cache_directory()) is not None:
        os.environ[KERNEL_CACHE_VARIABLE] = str(directory)
