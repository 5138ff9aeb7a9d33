"""Retention: which checkpoints of a directory are kept, and how the rest is removed.

Decided from the files on the disk after a save is durable, not from a list in memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import PositiveInt

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import forget_removed_uploads, waiting_for_upload
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import make_directories, remove_content, write_errors
from verl.checkpoint.ownership import unless_in_use
from verl.checkpoint.read.discovery import PINS, TRASH
from verl.component import Description, component

FEWEST_KEPT = 2


@component
class Retention(Description):
    """Rules of which checkpoints are kept. Tagged ones, those with a file `pins/NAME`, and the two newest always are.

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

    def kept(self, complete: list[Checkpoint], pinned: Iterable[str] = ()) -> set[str]:
        """The names of those that stay.

        Args:
            complete: in order of publication.
        """
        if self.keep_last_n is None:
            return {checkpoint.name for checkpoint in complete}
        kept = {checkpoint.name for checkpoint in complete[-max(self.keep_last_n, FEWEST_KEPT) :]} | {*pinned}
        kept |= {one.name for one in complete if self.keep_every is not None and one.step % self.keep_every == 0}
        kept |= {one.name for one in complete if one.manifest.tag is not None}
        best = self.best(complete)
        return kept if best is None else kept | {best.name}

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


def prune(store: CheckpointStore, retention: Retention, keep: Iterable[str] = ()) -> list[str]:
    """Remove what is neither kept nor named by `keep`. Bad checkpoints are not counted and not touched.

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
        complete = [checkpoint for checkpoint in store.complete() if retention.covers(checkpoint)]
        pins = store.directory / PINS
        kept = retention.kept(complete, store.disk.names(pins) if store.exists(pins) else ())
        kept |= waiting_for_upload(store, complete, kept) | {*keep}
        dropped = [checkpoint for checkpoint in complete if checkpoint.name not in kept]
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
