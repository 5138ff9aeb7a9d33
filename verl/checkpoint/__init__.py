"""Checkpoints that can be trusted: published by one rename, checked by hash, found by what they record.

    disk.py        every file-system call, behind one seam
    hashing.py     BLAKE3 of files, in leaves that can be checked alone
    files.py       whole files: written and synced, duplicated, removed
    tensors.py     logical tensors and the slices that tile them
    manifest.py    what a checkpoint holds; the only truth about it
    safetensors_bytes.py   rendering and reading safetensors
    published.py   opening a checkpoint's directory
    verify.py      whether it is what was written, quickly or in full
    delta.py  delta_file.py        a file as its difference from another one, coded and decoded
    reader.py      bytes of files and tensors, hashed while read
    ownership.py   one trainer at a time; the later one fences the earlier one out
    objects.py     deduplication by hard links
    discovery.py   which checkpoints are whole, and which is the newest
    participant.py one writer of a save
    staging.py     a save in progress, and its commit
    store.py       CheckpointStore, where a save begins
    retention.py   what is kept
    waiting.py     what the object storage behind a directory has confirmed
    tiers/         checkpoints in object storage
    locate.py      which checkpoint a path means
    manager.py     CheckpointManager: one checkpoint asked in plain words
    loading.py     its tensors in torch
    health.py      is there one to go on from?
    summary.py     what the commands tell of a checkpoint
    compare.py     in what two checkpoints differ
    export.py      a component as a plain Hugging Face directory
    materialize.py a checkpoint of whole files out of an increment
    plain.py       a component as a directory that other libraries open
    compat.py      which versions of verl read which checkpoints

and from live tensors to a published checkpoint, while training goes on:

    content.py     what a save consists of, as a trainer says it
    plan.py        the same in terms of bytes in memory
    arena.py       at most two pieces of shared memory
    snapshot.py    copies tensors into one of them
    images.py      files as they lie there, written past the page cache
    increment.py  choices.py       what an incremental save stores of each file
    carry_out.py   a plan, written and published
    channel.py  writer_process.py  supervisor.py   the process that does it, and its death
    writer.py      CheckpointWriter

Only loading, content, snapshot and writer import torch, and compare and export where they are asked for numbers or a
pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]


def __getattr__(name: str) -> Any:
    """Import what is exported here when it is first asked for."""
    if name == "CheckpointManager":
        from verl.checkpoint.manager import CheckpointManager

        return CheckpointManager
    raise AttributeError(f"module 'verl.checkpoint' has no attribute {name!r}")
