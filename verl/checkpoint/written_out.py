"""A directory of the user's, outside the store, that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from verl.checkpoint.disk import Disk
from verl.checkpoint.files import files_below, make_directories, remove_tree, write_errors
from verl.errors import ConfigError


def unused(disk: Disk, out: Path) -> Path:
    """Where to write, as an absolute path.

    Raises:
        ConfigError: something is there already.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out) and not (out.is_dir() and not disk.names(out)):
        raise ConfigError(f"OUT is {out}: there is something already. Give a directory that does not exist yet.")
    return out


@contextlib.contextmanager
def written_out(disk: Disk, out: Path, doing: str) -> Iterator[Path]:
    """A directory to be filled, which becomes `out` by one rename once it is durable; an error leaves nothing behind.

    Args:
        out: see `unused`.
        doing: for the error if the file system refuses.
    Raises:
        CheckpointWriteFailed: the file system refused.
    """
    staged = out.with_name(f".{out.name}-{secrets.token_hex(6)}")
    with write_errors(doing):
        make_directories(disk, out.parent, next(path for path in out.parents if path.is_dir()))
        make_directories(disk, staged, out.parent)
        try:
            yield staged
            for directory in files_below(disk, staged)[1]:
                disk.sync_directory(directory)
            disk.rename(staged, out)
        except BaseException:
            remove_tree(disk, staged)
            raise
        disk.sync_directory(out.parent)
