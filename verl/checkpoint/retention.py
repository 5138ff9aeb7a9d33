"""Retention: which checkpoints of a directory are kept, pinned and tagged, and how the rest is removed.

Decided from the files on the disk after a save is durable, not from a list in memory.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import forget_removed_uploads, waiting_for_upload
from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.filesystem import (
    files_below,
    is_directory,
    make_directories,
    read_errors,
    remove_content,
    write_by_rename,
    write_errors,
)
from verl.checkpoint.core.manifest import utc_now
from verl.checkpoint.ownership import unless_in_use
from verl.checkpoint.read.discovery import FORMAT, PINS, TRASH
from verl.component import Description, component
from verl.errors import BadCheckpoint, CheckpointNotFound

FEWEST_KEPT = 2
PIN_LIMIT_BYTES = 65_536


@component
class Retention(Description):
    """Rules of which checkpoints are kept. Pinned and tagged ones always are, and so are the two newest.

    Args:
        keep_last_n: this many of those published last; None keeps all.
        keep_best: name of a metric; the checkpoint with its best value is kept too.
        best_mode: whether the best value is the largest or the smallest.
        keep_every: also keep those whose step is a multiple of this.
        lineage: the runs that it decides on, each with the number of its last publication that belongs to them; all
            other checkpoints of the directory are another training's, and are neither counted nor touched. None: it
            decides on all.
    """

    keep_last_n: PositiveInt | None = None
    keep_best: str | None = None
    best_mode: Literal["max", "min"] = "max"
    keep_every: PositiveInt | None = None
    lineage: dict[str, int] | None = None

    def covers(self, checkpoint: Checkpoint) -> bool:
        """Whether it decides on this checkpoint."""
        return self.lineage is None or checkpoint.sequence <= self.lineage.get(checkpoint.manifest.run_id, 0)

    def kept(self, complete: list[Checkpoint], pinned: Iterable[str]) -> dict[str, str]:
        """The names of those that stay, with the reason.

        Args:
            complete: in order of publication.
        """
        if self.keep_last_n is None:
            return {checkpoint.name: "every checkpoint is kept" for checkpoint in complete}
        last = max(self.keep_last_n, FEWEST_KEPT)
        reasons = {checkpoint.name: f"among the last {last}" for checkpoint in complete[-last:]}
        if self.keep_every is not None:
            every = [checkpoint for checkpoint in complete if checkpoint.step % self.keep_every == 0]
            reasons |= {checkpoint.name: f"every {self.keep_every} steps" for checkpoint in every}
        if (best := self.best(complete)) is not None:
            reasons[best.name] = f"best {self.keep_best}"
        reasons |= {checkpoint.name: "tagged" for checkpoint in complete if checkpoint.manifest.tag is not None}
        return reasons | {checkpoint.name: "pinned" for checkpoint in complete if checkpoint.name in set(pinned)}

    def best(self, complete: list[Checkpoint]) -> Checkpoint | None:
        """The one with the best value of the metric, the newest of equals; None where none has a value."""
        key, sign = self.keep_best, 1 if self.best_mode == "max" else -1
        valued = [
            (sign * one.manifest.metrics[key], one.sequence, one) for one in complete if key in one.manifest.metrics
        ]
        return max(valued, key=lambda entry: entry[:2])[-1] if valued else None


def recorded_ancestors(state: Mapping[str, Any]) -> dict[str, int] | None:
    """The runs that the run of a `trainer_state.json` was resumed from; None if it has no record of them."""
    ancestors = state.get("lineage", {}).get("ancestors")  # whose values `parse_state` has checked
    return ancestors if isinstance(ancestors, dict) else None


def lineages_of(store: CheckpointStore, complete: list[Checkpoint]) -> list[dict[str, int]]:
    """The lineages in a directory, each of a run and its ancestors, in the form of `Retention.lineage`.

    A run whose checkpoints all belong to the lineage of a later one has none of its own. Checkpoints without recorded
    origin, e.g. of a script, form one lineage.
    """
    lines: dict[str, dict[str, int]] = {}
    newest: dict[str, int] = {}
    rootless: dict[str, int] = {}
    for checkpoint in complete:
        run_id, before = checkpoint.manifest.run_id, None
        with contextlib.suppress(BadCheckpoint, FileNotFoundError):
            before = recorded_ancestors(read_state(store.disk, checkpoint))
        newest[run_id] = max(newest.get(run_id, 0), checkpoint.sequence)
        if before is not None:
            lines[run_id] = {**before, run_id: sys.maxsize}
        else:
            rootless[run_id] = sys.maxsize
    leaves = [line for run_id, line in lines.items() if not _is_within(run_id, newest[run_id], lines)]
    older = [run_id for run_id in rootless if run_id not in lines and not _is_within(run_id, newest[run_id], lines)]
    return [*leaves, *([dict.fromkeys(older, sys.maxsize)] if older else [])]


def _is_within(run_id: str, newest: int, lines: dict[str, dict[str, int]]) -> bool:
    return any(newest <= line.get(run_id, 0) for other, line in lines.items() if other != run_id)


def _covered(
    store: CheckpointStore, retention: Retention, of_each_line: bool
) -> tuple[list[Checkpoint], dict[str, str], list[dict[str, int]]]:
    """The checkpoints on which the rules decide; names and reasons of those that stay; and the lines of descent.

    Args:
        of_each_line: the rules hold for each line of descent in the directory by itself, not for that of `retention`.
    """
    complete = [checkpoint for checkpoint in store.complete() if retention.covers(checkpoint)]
    lineages, pinned = lineages_of(store, complete) if of_each_line else [], pins(store)
    reasons = {} if of_each_line else retention.kept(complete, pinned)
    for line in lineages:
        rules = replace(retention, lineage=line)
        of = f" of run {list(line)[-1]}" if len(lineages) > 1 and retention.keep_last_n is not None else ""
        for name, reason in rules.kept(list(filter(rules.covers, complete)), pinned).items():
            reasons.setdefault(name, reason + (of if reason.startswith(("among", "best")) else ""))
    return complete, reasons | waiting_for_upload(store, complete, reasons), lineages


def prune(store: CheckpointStore, retention: Retention, of_each_line: bool = False) -> list[str]:
    """Remove what is not kept. Bad checkpoints are not counted and not touched.

    Args:
        of_each_line: the rules hold for each line of descent in the directory by itself, not for that of `retention`.

    >>> prune(store, Retention(keep_last_n=3, keep_best="eval/accuracy"))  # there are two
    []

    Returns:
        The names of those removed.
    Raises:
        CheckpointFenced: another trainer has taken over; nothing was removed.
        CheckpointWriteFailed: the file system refused; what remains verifies.
    """
    store.claim_directory()
    with store.locked(), write_errors("pruning checkpoints"):
        store.check_claim()
        complete, reasons, _ = _covered(store, retention, of_each_line)
        dropped = [checkpoint for checkpoint in complete if checkpoint.name not in reasons]
        if not dropped:
            return []
        trash, removed = store.directory / TRASH, list[str]()
        make_directories(store.disk, trash, store.directory)
        for checkpoint in dropped:
            with unless_in_use(store.disk, checkpoint) as is_free:
                if is_free:
                    store.disk.rename(checkpoint.directory, trash / f"{checkpoint.name}-{secrets.token_hex(6)}")
                    removed.append(checkpoint.name)
        store.disk.sync_directory(trash)
        store.disk.sync_directory(store.directory)
    with write_errors("emptying the trash"):
        remove_content(store.disk, trash)  # not the directory: another process may be moving something there
        forget_removed_uploads(store)
    return removed


def pin(store: CheckpointStore, name: str, reason: str = "") -> None:
    """Keep a checkpoint until it is unpinned.

    Raises:
        CheckpointNotFound: there is none of this name.
    """
    with write_errors(f"pinning {name}"), _locked(store):  # else it may be pruned between the look and the pin
        checkpoint = store.open(name)
        directory = store.directory / PINS
        make_directories(store.disk, directory, store.directory)
        record = {"reason": reason, "since": utc_now()}
        write_by_rename(store.disk, directory / checkpoint.name, json.dumps(record).encode() + b"\n")
        store.disk.sync_directory(directory)
        store.disk.sync_directory(store.directory)


def _locked(store: CheckpointStore) -> contextlib.AbstractContextManager[None]:
    """The lock of a directory; none where no trainer has claimed it."""
    return store.locked() if store.exists(store.directory / FORMAT) else contextlib.nullcontext()


def unpin(store: CheckpointStore, name: str) -> None:
    """Let retention decide again.

    Raises:
        CheckpointNotFound: it is not pinned.
    """
    if name not in pins(store):
        raise CheckpointNotFound(f"{store.directory / name} is not pinned")
    with write_errors(f"unpinning {name}"):
        store.disk.unlink(store.directory / PINS / name)
        store.disk.sync_directory(store.directory / PINS)


def pins(store: CheckpointStore) -> dict[str, str]:
    """The pinned names and why."""
    with read_errors("looking for pins"):
        names = store.disk.names(store.directory / PINS) if store.exists(store.directory / PINS) else []
    return {name: _reason(store, name) for name in names if not name.endswith(".tmp")}


def _reason(store: CheckpointStore, name: str) -> str:
    try:
        return str(json.loads(store.disk.read(store.directory / PINS / name, PIN_LIMIT_BYTES))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the file alone is the pin


@dataclass(frozen=True, kw_only=True)
class CleanupPlan:
    """Checkpoints and files that are cleaned, or would be.

    Args:
        removed: names of checkpoints that retention does not keep.
        kept: names of the others, and why.
        leftovers: what dead processes left in `staging/` and `trash/`.
        freed_bytes: in all, files that remain in another checkpoint not counted.
        lineages: the runs of each line of descent; the rules hold for each by itself.
    """

    removed: tuple[str, ...]
    kept: dict[str, str]
    leftovers: tuple[str, ...]
    freed_bytes: int
    lineages: tuple[tuple[str, ...], ...] = ()


def plan(store: CheckpointStore, retention: Retention) -> CleanupPlan:
    """Plan of what `clean` would do; changes nothing."""
    complete, reasons, lineages = _covered(store, retention, of_each_line=True)
    dropped = [checkpoint for checkpoint in complete if checkpoint.name not in reasons]
    with read_errors(f"looking at {store.directory}"):
        with _locked(store):
            leftovers = list(store.leftovers())
        going = [*(checkpoint.directory for checkpoint in dropped), *leftovers]
        freed = _freed(store, going)
    return CleanupPlan(
        removed=tuple(checkpoint.name for checkpoint in dropped),
        kept={checkpoint.name: reasons[checkpoint.name] for checkpoint in complete if checkpoint.name in reasons},
        leftovers=tuple(path.relative_to(store.directory).as_posix() for path in leftovers),
        freed_bytes=freed,
        lineages=tuple(tuple(line) for line in lineages),
    )


def clean(store: CheckpointStore, retention: Retention) -> CleanupPlan:
    """Retention for each line of descent by itself, then what dead processes left.

    A running trainer stays the owner of the directory, and its current save is not touched.

    Raises:
        CheckpointFenced: a trainer took over in this moment; nothing was removed.
        CheckpointWriteFailed: the file system refused; what remains verifies.
    """
    planned = plan(store, retention)
    if not (planned.removed or planned.leftovers or planned.freed_bytes):
        return planned
    store.borrow_claim()
    removed = prune(store, retention, of_each_line=True)
    store.remove_leftovers()
    reasons = dict.fromkeys(planned.removed, "a run was resumed from it and goes on") | planned.kept
    reasons = {name: reason for name, reason in reasons.items() if name not in removed}
    return replace(planned, removed=tuple(removed), kept=reasons)


def _freed(store: CheckpointStore, going: list[Path]) -> int:
    """Bytes of the files all of whose names go."""
    names: dict[tuple[int, int], list[int]] = {}  # of each inode: its size, and how many of its names remain
    for root in going:
        with contextlib.suppress(FileNotFoundError):  # its trainer prunes it, or empties the trash, at the same time
            is_tree = is_directory(store.disk, root)
            for path in [root / name for name in files_below(store.disk, root)[0]] if is_tree else [root]:
                status = store.disk.status(path)
                entry = names.setdefault((status.st_dev, status.st_ino), [status.st_size, status.st_nlink])
                entry[1] -= 1
    return sum(size for size, remaining in names.values() if remaining == 0)
