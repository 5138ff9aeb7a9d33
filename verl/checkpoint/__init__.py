"""Checkpoints: saved asynchronously, committed by one rename, verified by hash, found by what they record.

arena              Host memory that a snapshot is copied into and that the writer process reads
carry_out          Carrying out the plan of a save: from bytes in memory to a published checkpoint
channel            A channel between a trainer and its writer process: objects
choices            Which form each file of an incremental save takes
compare            In what two checkpoints differ: tensors and files by digest, configuration and state by key
compat             Which versions of verl read which checkpoints
content            What one save consists of, as a trainer says it: components with live tensors, small files
delta              What a file holds beyond another one: a tensor as its difference from a base, in byte planes
delta_file         A file of a checkpoint that is stored as its difference from a base, as a reader sees it
discovery          What lies in a directory of checkpoints: which are whole, and which is the newest
disk               Every file-system call of the checkpoint store
export             A component of a checkpoint as a plain Hugging Face directory, hashed on its way out
files              Whole files: written and made durable, duplicated at the least cost
hashing            BLAKE3 of files, in leaves: pieces that can be checked without reading the rest
health             Is there a checkpoint to go on from? Answered from one manifest where all is well
images             Files whose whole content lies in memory on a boundary of pages, written past the page cache
increment          What an incremental save stores of a file: nothing, its difference from a base, or all of it
joint              A save that several processes write: where their reports lie, who waits for them
loading            A component's tensors in torch: mapped from the files, hashed when they are first read
locate             Which checkpoint a path means: a directory of checkpoints, one of them, `latest`
manager            CheckpointManager: one checkpoint, or the newest of a directory, asked in plain words
manifest           The manifest of a checkpoint: every file with its digest
materialize        A checkpoint written out with every file whole, to be taken elsewhere: the same content
objects            Deduplication: files that stay the same from save to save
ownership          One trainer at a time: the later one to claim a directory fences the earlier one out
participant        One writer of a save: a thread, this process
plain              A component as a directory that other libraries open
plan               What is to be written for one save, in terms of bytes in memory
published          Opening a checkpoint's directory: what COMMIT and the manifest say
reader             Bytes of a checkpoint's files and tensors, hashed while they are read
retention          What is kept of the checkpoints of a directory, and how the rest leaves it
safetensors_bytes  Rendering and reading the safetensors format: a header in JSON
settings           When checkpoints are saved, where, how, and which of them are kept: the group `checkpoint`
shares             Who writes what: the tensors of several processes divided among them
snapshot           Copying live tensors into an arena, while training goes on
staging            A save in progress: participants write below `staging/`
store              CheckpointStore: where a save begins, is published, and what it leaves behind is cleaned
summary            What the commands tell of checkpoints, as plain values: whether each is whole, what it holds
supervisor         The writer process as the trainer sees it: started when it is needed, and again when it died
tensors            Logical tensors: what a model or an optimizer holds
tiers/             Checkpoints in object storage, behind the local disk
upkeep             Cleaning a directory of checkpoints by hand, beside a trainer that may be saving there
verify             Whether a checkpoint is what was written, at three levels of effort
waiting            What a directory of checkpoints knows of the store behind it: where that is
writer             CheckpointWriter: from live tensors to a published checkpoint, while training goes on
writer_process     The process that writes checkpoints: `python -m verl.checkpoint.writer_process`
written_out        A directory of the user's, outside the store, that appears whole or not at all
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
