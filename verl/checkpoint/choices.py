"""Which form each file of an incremental save takes, decided from what the checkpoint before it holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from verl.checkpoint.disk import Disk
from verl.checkpoint.hashing import hash_buffers
from verl.checkpoint.images import Image, Source
from verl.checkpoint.increment import Base, Incremental, Prospect
from verl.checkpoint.manifest import FileEntry
from verl.checkpoint.participant import Participant
from verl.checkpoint.plan import SavePlan
from verl.checkpoint.published import Published
from verl.checkpoint.reader import CheckpointReader
from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.tensors import ITEM_BYTES, LogicalTensor
from verl.checkpoint.verify import verified
from verl.errors import BadCheckpoint, CheckpointNotFound

log = logging.getLogger(__name__)

FEWEST_BYTES = 4096  # a smaller file takes as many blocks of the disk as its delta


@dataclass(frozen=True)
class Choice:
    """How a file is stored; written, where it is neither.

    Attributes:
        entry: the file.
        hash_s: processor seconds that hashing it took.
        unchanged_in: a checkpoint that has it.
        prospect: of storing it as a difference.
    """

    entry: FileEntry
    hash_s: float
    unchanged_in: Published | None = None
    prospect: Prospect | None = None

    def store(self, participant: Participant) -> bool:
        """Store the file without writing all of it; False where it is to be written."""
        if self.unchanged_in is not None:
            participant.share(self.entry.path, self.unchanged_in)
            return True
        found = self.prospect
        return found is not None and participant.write_delta(self.entry, found.buffers(), found.base) is not None


def choose(store: CheckpointStore, plan: SavePlan, source: Source) -> dict[str, Choice]:
    """A choice for each image of a plan by path; none where the save is no increment.

    Made before the save begins, since it decides how much space that needs.
    """
    if plan.increment is None:
        return {}
    source.wait(plan.num_bytes)
    increments = Increments(plan.increment, _newest(store), _pinned(store, plan.increment), plan.tensors, store.disk)
    chosen = {}
    for image in plan.images:
        began = time.thread_time()
        entry = FileEntry.of(image.path, hash_buffers(image.buffers(source)))
        hash_s = time.thread_time() - began
        there = increments.unchanged(entry)
        prospect = increments.prospect(image, source) if there is None else None
        chosen[image.path] = Choice(entry, hash_s, there, prospect)
    return chosen


def needed_bytes(image: Image, choice: Choice | None) -> int:
    """That storing a file will take, of a difference by its sample."""
    if image.is_constant or (choice is not None and choice.unchanged_in is not None):
        return 0
    share = 1.0 if choice is None or choice.prospect is None else min(1.0, 1.25 * choice.prospect.ratio)
    return int(share * image.num_bytes)


class Increments:
    """Decides for the files of one save.

    Args:
        newest: the checkpoint before this save; None where there is none.
        pinned: the checkpoint that `base` names, or None.
        tensors: that lie in the files of this save.
    """

    def __init__(
        self,
        settings: Incremental,
        newest: Published | None,
        pinned: Published | None,
        tensors: Sequence[LogicalTensor],
        disk: Disk,
    ):
        self._settings, self._newest, self._pinned, self._disk = settings, newest, pinned, disk
        self._items: dict[str, dict[int, tuple[str, int]]] = {}  # of each file: offset -> key, bytes of an element
        for tensor in tensors:
            for part in tensor.slices:
                found = self._items.setdefault(part.file, {})
                found[part.offset] = (part.key or tensor.name, ITEM_BYTES[tensor.dtype])

    def unchanged(self, entry: FileEntry) -> Published | None:
        """The newest checkpoint, if it holds the same file and that is still what was written; never a damaged one."""
        if self._newest is None:
            return None
        there = self._newest.manifest.file(entry.path)
        if there is None or (there.size, there.blake3) != (entry.size, entry.blake3):
            return None
        return self._newest if self._is_intact(self._newest, entry.path) else None

    def prospect(self, image: Image, source: Source) -> Prospect | None:
        """How a file may be stored as a difference; None where it is to be written."""
        if image.path not in self._items or image.num_bytes < FEWEST_BYTES:
            return None
        base = self._base_of(image.path)
        if base is None:
            return None
        if not self._is_intact(base.published, base.entry.path):
            log.error("%s of %s is damaged: it is written anew", base.entry.path, base.published.directory)
            return None
        found = Prospect(base, image, source, self._items[image.path], self._disk)
        return found if found.ratio <= self._settings.pays_below else None

    def _base_of(self, path: str) -> Base | None:
        published = self._pinned or self._newest
        if published is None:
            return None
        made = published.manifest.delta(path)
        stored = published.manifest.stored(path if made is None else made.base)
        if stored is None:
            return None
        if made is None:
            return Base(published, stored, stored.linked_from or published.name, 1)
        number = 1 if self._pinned else made.number + 1
        if number > self._settings.saves_per_base:
            return None
        return Base(published, stored, made.base_checkpoint, number)

    def _is_intact(self, published: Published, path: str) -> bool:
        try:
            CheckpointReader(published, self._disk).check(path)
        except BadCheckpoint:
            return False
        return True


def _newest(store: CheckpointStore) -> Published | None:
    try:
        return store.newest()
    except (CheckpointNotFound, BadCheckpoint):
        return None


def _pinned(store: CheckpointStore, settings: Incremental) -> Published | None:
    if settings.base is None:
        return None
    try:
        return verified(store.disk, settings.base)
    except (BadCheckpoint, OSError) as error:
        log.error("checkpoint.incremental_base cannot be used: %s", error)
        return None
