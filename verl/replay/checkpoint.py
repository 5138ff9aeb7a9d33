"""Format of a saved replay buffer: shard files, which are hard links, and a small file that lists them.

replay_buffer/buffer.json                counters, and every shard: rows, bytes, digests, whether it is in the store
replay_buffer/rows_FIRST_DIGEST.arrow    a local shard
replay_buffer/rows_..._.index.arrow      index columns of a shard in the store

The number of processes and the rows in device memory are not saved; they are determined when the buffer is restored.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from verl.errors import ReplayCorrupt
from verl.replay.config import COMPONENT
from verl.replay.shard import ShardFile
from verl.utils.external_input import ByteCount, ExternalInputError, parse_as, read_bytes

FILE, VERSION = "buffer.json", 1


@dataclass(frozen=True, kw_only=True)
class SavedBuffer:
    """Content of `buffer.json`.

    Attributes:
        first, end: range of row numbers, end excluded.
        lost: ranges of lost rows, ends excluded.
    """

    version: ByteCount
    first: ByteCount
    end: ByteCount
    num_groups: ByteCount
    num_steps: ByteCount
    num_lost: ByteCount
    lost: tuple[tuple[ByteCount, ByteCount], ...]
    shards: tuple[ShardFile, ...]

    def as_json(self) -> bytes:
        """The content of the file."""
        return (json.dumps(dataclasses.asdict(self)) + "\n").encode()


def read_saved(file: Path) -> SavedBuffer:
    """Read a `buffer.json`.

    Raises:
        ReplayCorrupt: it does not describe a buffer, or is of a newer version.
    """
    try:
        saved = parse_as(SavedBuffer, read_bytes(file))
    except ExternalInputError as error:
        raise ReplayCorrupt(f"{file} does not describe a replay buffer ({error})") from error
    if saved.version > VERSION:
        raise ReplayCorrupt(f"{file} is of version {saved.version}: this verl reads up to {VERSION}")
    if any(first > end for first, end in saved.lost):
        raise ReplayCorrupt(f"{file} lists lost rows that end before they begin")
    return saved


def cold_names(directory: Path) -> set[str]:
    """Names of the shards in the store that checkpoints below a directory need."""
    buffers = [read_saved(file) for file in directory.glob(f"*/{COMPONENT}/{FILE}")]
    return {file.name for buffer in buffers for file in buffer.shards if file.place == "cold"}
