"""Checkpoints: saved asynchronously, committed by one rename, verified by hash, and found by their recorded metadata.

commit/       The commit protocol: who may write, what is staged, and how a checkpoint becomes visible
config        The group `checkpoint`: when checkpoints are saved, where, how, and which of them are kept
core/         The format of a checkpoint on disk: files, manifest, digests
describe      Descriptions of checkpoints for the command line, as plain values: status and content
export        Export of a checkpoint: a component as a Hugging Face directory
manager       CheckpointManager: the user's access to one checkpoint, or to the newest of a directory
ownership     Ownership: one run at a time saves in a directory, or uploads to a place in a store
read/         Finding, verifying and reading checkpoints. Nothing here writes
remote/       Checkpoints in object storage, behind the local disk
resolve       Which checkpoint a path means: `latest`, a checkpoint, a directory of them, a run, or an address
retention     Retention: which checkpoints of a directory are kept
save/         From live tensors to a committed checkpoint, while training continues
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]


def __getattr__(name: str) -> Any:
    """Import exported names lazily."""
    if name == "CheckpointManager":
        from verl.checkpoint.manager import CheckpointManager

        return CheckpointManager
    raise AttributeError(f"module 'verl.checkpoint' has no attribute {name!r}")
