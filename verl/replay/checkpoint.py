"""Saving and restoring the replay buffer: shard files are hard-linked, and a small file lists them.

replay_buffer/buffer.json                counters, and every shard: rows, bytes, digests, whether it is in the store
replay_buffer/rows_FIRST_DIGEST.arrow    a local shard
replay_buffer/rows_..._.index.arrow      index columns of a shard in the store

The number of processes and the rows in device memory are not saved; they are determined when the buffer is restored.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from verl.checkpoint.core.filesystem import duplicate
from verl.checkpoint.core.hashing import hash_buffers
from verl.errors import ReplayCorrupt
from verl.replay.buffer import TieredBuffer
from verl.replay.config import COMPONENT, SharedShard
from verl.replay.shard import Shard, ShardFile, read_index
from verl.utils.external_input import ByteCount, ExternalInputError, parse_as, read_bytes

_log = logging.getLogger(__name__)
FILE, VERSION = "buffer.json", 1


def buffer_state(buffer: TieredBuffer) -> dict[str, bytes | SharedShard]:
    """Files of a checkpoint by name. All rows are written to disk first; rows that it refused are bytes here."""
    refused = buffer.flush()
    entries: list[dict] = []
    state: dict[str, bytes | SharedShard] = {}
    for shard in buffer.index.shards:
        if (file := shard.file) is None:
            continue
        name, leaves = file.name, file.leaves
        if shard.is_stored:
            name = file.index_name
            leaves = hash_buffers([read_bytes(buffer.directory / name)])
        state[name] = SharedShard(buffer.directory / name, leaves)
        entries.append(_entry(file, "cold" if shard.is_stored else "here"))
    for file, data in refused:
        state[file.name] = data
        entries.append(_entry(file, "here"))
    index = buffer.index
    description = {
        "version": VERSION, "first": index.first, "end": index.end, "num_groups": buffer.num_groups,
        "num_steps": buffer.num_steps, "num_lost": buffer.num_lost,
        "lost": _ranges(index.first + np.flatnonzero(~index["is_there"])), "shards": entries,
    }  # fmt: skip
    return {FILE: (json.dumps(description) + "\n").encode(), **state}


def restore_buffer(buffer: TieredBuffer, directory: Path) -> None:
    """Restore an empty buffer from a checkpoint: files are linked or copied, and the hot tier is read from them.

    Args:
        buffer: without rows.
        directory: `replay_buffer/` of a checkpoint, whose files were verified.
    Raises:
        ReplayCorrupt: rows are missing, or a file is cut short.
    """
    assert not len(buffer.index), "only an empty buffer can be restored"
    saved = _read(directory / FILE)
    index, out_of_reach = buffer.index, list[SavedShard]()
    for file in sorted(saved.shards, key=lambda file: file.first_row):
        index.skip_to(file.first_row)
        is_stored = file.place == "cold"
        name = file.index_name if is_stored else file.name
        if is_stored and buffer.cold is None:
            out_of_reach.append(file)
            index.append(read_index(read_bytes(directory / name)))
            continue
        path = buffer.directory / name
        if not duplicate(buffer.disk, directory / name, path):
            shutil.copyfile(directory / name, path)
        shard = Shard(file.first_row, file, None if is_stored else path, is_stored)
        index.shards.append(shard)
        index.append(read_index(read_bytes(path)) if is_stored else shard.index(buffer.disk))
    index.skip_to(saved.end)
    for first, end in saved.lost:
        index.lose(first, end)
    index.drop_before(saved.first)
    buffer.num_groups, buffer.num_steps, buffer.num_lost = saved.num_groups, saved.num_steps, saved.num_lost
    if num_lost := sum(index.lose(file.first_row, file.end) for file in out_of_reach):
        buffer.num_lost += num_lost
        _log.warning(
            "%d replay rows are lost: they are in object storage, and this run has none. To restore them, resume "
            "from the same checkpoint with storage= as before.",
            num_lost,
        )
    buffer.fill_hot()


def cold_names(directory: Path) -> set[str]:
    """Names of the shards in the store that checkpoints below a directory need."""
    saved = [_read(file) for file in directory.glob(f"*/{COMPONENT}/{FILE}")]
    return {file.name for buffer in saved for file in buffer.shards if file.place == "cold"}


@dataclass(frozen=True, kw_only=True)
class SavedShard(ShardFile):
    """A shard of a saved buffer, and whether it is local or in the store."""

    place: Literal["here", "cold"]


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
    shards: tuple[SavedShard, ...]


def _read(file: Path) -> SavedBuffer:
    try:
        saved = parse_as(SavedBuffer, read_bytes(file))
    except ExternalInputError as error:
        raise ReplayCorrupt(f"{file} does not describe a replay buffer ({error})") from error
    if saved.version > VERSION:
        raise ReplayCorrupt(f"{file} is of version {saved.version}: this verl reads up to {VERSION}")
    if any(first > end for first, end in saved.lost):
        raise ReplayCorrupt(f"{file} lists lost rows that end before they begin")
    return saved


def _entry(file: ShardFile, place: str) -> dict:
    return {
        "first_row": file.first_row, "num_rows": file.num_rows, "size": file.size,
        "leaves": [list(leaf) for leaf in file.leaves], "place": place,
    }  # fmt: skip


def _ranges(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Convert ascending numbers to ranges [first, end)."""
    if not len(numbers):
        return []
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
