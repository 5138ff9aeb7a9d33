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
from typing import Any, Literal

import numpy as np

from verl.checkpoint.core.filesystem import duplicate
from verl.checkpoint.core.hashing import hash_buffers
from verl.errors import ReplayCorrupt
from verl.replay.buffer import TieredBuffer
from verl.replay.checkpoint_state import COMPONENT, FILE, VERSION, ReplayState, SharedShard
from verl.replay.disk_tier import SUFFIX, MappedShard, ReplayShard, index_name, read_index
from verl.utils.external_input import ByteCount, ExternalInputError, parse_as, read_bytes

_log = logging.getLogger(__name__)


def buffer_state(buffer: TieredBuffer) -> ReplayState:
    """Flush all rows to disk and return the state; rows that the disk refused are included as bytes."""
    shards, refused = buffer.write_buffer.seal()
    for shard in shards:
        buffer.disk_tier.add(shard, buffer.directory / shard.name)
    buffer.settle()
    entries, shared = [], {}
    for placed in buffer.disk_tier:
        is_far = placed.is_stored
        entries.append({**placed.shard.as_json(), "place": "cold" if is_far else "here"})
        name = index_name(placed.shard) if is_far else placed.shard.name
        path = buffer.directory / name
        leaves = hash_buffers([read_bytes(path)]) if is_far else placed.shard.leaves
        shared[name] = SharedShard(path, leaves)
    refused = [(shard, data) for shard, data in refused if shard.name not in shared]
    entries += [{**shard.as_json(), "place": "here"} for shard, _ in refused]
    index = buffer.index
    lost = index.first + np.flatnonzero(~index["is_there"])
    description = {
        "version": VERSION, "first": index.first, "end": index.end, "num_groups": buffer.num_groups,
        "num_steps": buffer.num_steps, "num_lost": buffer.num_lost, "lost": _ranges(lost), "shards": entries,
    }  # fmt: skip
    files = {FILE: (json.dumps(description) + "\n").encode(), **{shard.name: bytes(data) for shard, data in refused}}
    return ReplayState(files, shared)


def restore_buffer(buffer: TieredBuffer, directory: Path, verify: bool) -> None:
    """Restore an empty buffer from a checkpoint: files are linked or copied, and the hot tier is read from them.

    Args:
        buffer: without rows.
        directory: `replay_buffer/` of a checkpoint.
        verify: hash the files; unnecessary if the whole checkpoint was hashed.
    Raises:
        ReplayCorrupt: rows are missing, or differ from what was written.
    """
    assert not len(buffer.index), "only an empty buffer can be restored"
    saved = _read(directory / FILE)
    index, out_of_reach = buffer.index, list[ReplayShard]()
    for entry in sorted(saved.shards, key=lambda entry: entry.first_row):
        shard = entry.shard
        if not len(index):
            index.first = index.end = shard.first_row
        index.append(_lost_rows(shard.first_row - index.end), is_there=False)
        if entry.place == "cold" and buffer.cold is None:
            out_of_reach.append(shard)
            index.append(read_index(read_bytes(directory / index_name(shard))))
        else:
            index.append(_take_over(buffer, directory, shard, entry.place == "cold", verify))
    index.append(_lost_rows(saved.end - index.end), is_there=False)
    for first, end in saved.lost:
        index.lose(first, end)
    index.drop_before(saved.first)
    buffer.num_groups, buffer.num_steps, buffer.num_lost = saved.num_groups, saved.num_steps, saved.num_lost
    if num_lost := sum(index.lose(shard.first_row, shard.end) for shard in out_of_reach):
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
    return {shard.name for one in saved for shard in one.shards if shard.place == "cold"}


@dataclass(frozen=True, kw_only=True)
class SavedShard(ReplayShard):
    """A shard of a saved buffer, and whether it is local or in the store."""

    place: Literal["here", "cold"]

    @property
    def shard(self) -> ReplayShard:
        return ReplayShard(first_row=self.first_row, num_rows=self.num_rows, size=self.size, leaves=self.leaves)


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


def files_of(directory: Path) -> list[Path]:
    """Shard files of a directory in order of their rows, for reading without a buffer."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if not path.name.endswith(".index.arrow"))


def _take_over(buffer: TieredBuffer, source: Path, shard: ReplayShard, is_far: bool, verify: bool) -> dict[str, Any]:
    """Add a shard to the disk tier, and return its index columns."""
    name = index_name(shard) if is_far else shard.name
    path = buffer.directory / name
    if not duplicate(buffer.disk, source / name, path):
        shutil.copyfile(source / name, path)
    if is_far:
        buffer.disk_tier.add(shard, None, is_stored=True)
        return read_index(read_bytes(path))
    if verify and hash_buffers([buffer.disk.map(path)]) != shard.leaves:
        raise ReplayCorrupt(f"{source / name} differs from what was written")
    buffer.disk_tier.add(shard, path)
    return MappedShard(buffer.disk, path, shard).index()


def _lost_rows(count: int) -> dict[str, np.ndarray]:
    zeros = np.zeros(max(0, count))
    return dict.fromkeys(("group", "step", "policy_version", "score", "advantage"), zeros)


def _ranges(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Convert ascending numbers to ranges [first, end)."""
    if not len(numbers):
        return []
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
