"""What is to be written for one save, in terms of bytes in memory: all that whoever writes it must be told.

A plan speaks of no tensor objects and travels to the process that carries it out, which never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.hashing import Leaf
from verl.checkpoint.images import Image
from verl.checkpoint.increment import Incremental
from verl.checkpoint.joint import Joint
from verl.checkpoint.tensors import LogicalTensor


@dataclass(frozen=True, kw_only=True)
class LinkedFile:
    """A file taken over from an earlier checkpoint of the same directory, unread, with the tensors that lie in it.

    Args:
        path: within the new checkpoint.
        checkpoint: name of the earlier one; None is the newest.
        source: path there; None is the same path.
        blake3: what its digest must be, where that is known.
    """

    path: str
    checkpoint: str | None = None
    source: str | None = None
    blake3: str | None = None


@dataclass(frozen=True, kw_only=True)
class CopiedFile:
    """A file from outside; shared with the newest checkpoint where that holds the same bytes, else copied or cloned.

    Args:
        path: within the new checkpoint.
        source: the file.
        blake3: what its digest must be (`FileEntry.blake3`), where that is known; it is then not read if the newest
            checkpoint has it.
    """

    path: str
    source: Path
    blake3: str | None = None


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """A file from outside that nobody changes any more: hard-linked where the file system can, and not read.

    Args:
        path: within the new checkpoint.
        source: the file; it stays until the save is over.
        leaves: its digest, from when it was written.
    """

    path: str
    source: Path
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """One save.

    Args:
        num_bytes: of the memory in which the images lie.
        images: files to be written, on boundaries of pages in the memory.
        tensors: what lies in the images.
        links, copies, shared: files that are there already.
        state: for `trainer_state.json`.
        metrics: at this step, for retention.
        increment: store what changed alone; None writes every image.
        joint: where several processes write this save.
    """

    step: int
    tag: str | None
    num_bytes: int
    images: tuple[Image, ...]
    tensors: tuple[LogicalTensor, ...]
    links: tuple[LinkedFile, ...] = ()
    copies: tuple[CopiedFile, ...] = ()
    shared: tuple[SharedFile, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    increment: Incremental | None = None
    joint: Joint | None = None


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What became of a plan.

    Attributes:
        name, directory, sequence: of the published checkpoint; of a participant's part, its name, the staging directory
            and 0.
        num_bytes: of the images, of all participants.
        written_bytes: of files that no earlier checkpoint shares, likewise.
        begin_s, write_s, commit_s, prune_s: seconds, one after another.
        hash_s: processor seconds of hashing, during `write_s`.
        pruned: names of the checkpoints that retention removed.
        prune_error: why retention failed; the save did not.
    """

    name: str
    directory: Path
    sequence: int
    num_bytes: int
    written_bytes: int
    begin_s: float
    write_s: float
    hash_s: float
    commit_s: float
    prune_s: float
    pruned: tuple[str, ...] = ()
    prune_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """What became of one call of `save`.

    Attributes:
        report: of a published checkpoint, else None.
        error: why it was not published, else None.
        was_skipped: no arena was free, and `when_busy` is skip.
        stall_s: that the call of `save` took.
        copied_s: after which the weights might change, from the call on.
        total_s: until it was published, from the call on.
        num_deaths: of the writer process during this save.
    """

    step: int
    tag: str | None
    report: SaveReport | None = None
    error: Exception | None = None
    was_skipped: bool = False
    stall_s: float = 0.0
    copied_s: float = 0.0
    total_s: float = 0.0
    num_deaths: int = 0
