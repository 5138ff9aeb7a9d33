"""Cleaning a directory of checkpoints by hand, beside a trainer that may be saving there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.discovery import STAGING, TRASH
from verl.checkpoint.files import files_below, is_directory, read_errors
from verl.checkpoint.ownership import FORMAT
from verl.checkpoint.published import Published
from verl.checkpoint.retention import Retention, collect_garbage, pins, prune
from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.waiting import held_back


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """What is cleaned, or would be.

    Args:
        removed: names of checkpoints that retention does not keep.
        kept: names of the others, and why.
        leftovers: what dead processes left in `staging/` and `trash/`.
        freed_bytes: in all, files that remain in another checkpoint not counted.
    """

    removed: tuple[str, ...]
    kept: dict[str, str]
    leftovers: tuple[str, ...]
    freed_bytes: int


def plan(store: CheckpointStore, retention: Retention) -> Cleaning:
    """What `clean` would do; changes nothing."""
    complete = store.complete()
    kept = retention.kept(complete, pins(store))
    kept |= held_back(store, complete, kept)
    dropped = [published for published in complete if published.name not in kept]
    with read_errors(f"looking at {store.directory}"):
        leftovers = list(_leftovers(store))
        going = [*(published.directory for published in dropped), *leftovers]
        freed = _freed(store, going)
    return Cleaning(
        removed=_names(dropped),
        kept={published.name: kept[published.name] for published in complete if published.name in kept},
        leftovers=tuple(path.relative_to(store.directory).as_posix() for path in leftovers),
        freed_bytes=freed,
    )


def clean(store: CheckpointStore, retention: Retention) -> Cleaning:
    """Retention now, then what dead processes left, then shared files that no checkpoint holds any more.

    A living trainer stays the owner of the directory, and what it is saving is left alone.

    Raises:
        CheckpointFenced: a trainer took over in this moment; nothing was removed.
        CheckpointWriteFailed: the file system refused; what remains verifies.
    """
    planned = plan(store, retention)
    if not (planned.removed or planned.leftovers or planned.freed_bytes):
        return planned
    store.ownership.borrow()
    removed = prune(store, retention)
    collect_garbage(store)
    kept = {name: reason for name, reason in planned.kept.items() if name not in removed}
    return Cleaning(removed=tuple(removed), kept=kept, leftovers=planned.leftovers, freed_bytes=planned.freed_bytes)


def _names(checkpoints: list[Published]) -> tuple[str, ...]:
    return tuple(published.name for published in checkpoints)


def _leftovers(store: CheckpointStore) -> Iterator[Path]:
    """Of dead processes: staged saves that nobody holds a lock on, and all of the trash."""
    # Under the lock of the store a save is either not begun or has its own lock: looking cannot come between the two.
    with store.ownership.locked() if store.exists(store.directory / FORMAT) else contextlib.nullcontext():
        for part in (STAGING, TRASH):
            inside = store.directory / part
            for name in store.disk.names(inside) if store.exists(inside) else []:
                if part == TRASH or _is_abandoned(store, inside / name):
                    yield inside / name


def _is_abandoned(store: CheckpointStore, staged: Path) -> bool:
    if not is_directory(store.disk, staged):
        return True
    try:
        lease = store.disk.lock(staged)
    except OSError:  # no locks here: what may be alive is left alone
        return False
    if lease is None:
        return False
    store.disk.close(lease)
    return True


def _freed(store: CheckpointStore, going: list[Path]) -> int:
    """Bytes of the files all of whose names go; an object that no checkpoint holds afterwards goes too."""
    names: dict[tuple[int, int], list[int]] = {}  # of each inode: its size, and how many of its names remain
    objects = store.directory / "objects"
    for root in [*going, *([objects] if store.exists(objects) else [])]:
        paths = [root / name for name in files_below(store.disk, root)[0]] if is_directory(store.disk, root) else [root]
        for path in paths:
            status = store.disk.status(path)
            entry = names.setdefault((status.st_dev, status.st_ino), [status.st_size, status.st_nlink])
            entry[1] -= 1
    return sum(size for size, remaining in names.values() if remaining == 0)
