"""Saving and restoring the replay buffer: shards are linked as they are, and one small file says how they belong
together.

replay_buffer/buffer.json                counters, and every shard: rows, bytes, digests, whether it lies in the store
replay_buffer/rows_FIRST_DIGEST.arrow    a shard that is here
replay_buffer/rows_..._.index.arrow      of a shard in the store, what is known here of its rows

The number of processes and the rows in device memory are not saved: they are determined again when the buffer is
restored.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint.core.filesystem import duplicate
from verl.checkpoint.core.hashing import hash_buffers
from verl.errors import ReplayCorrupt
from verl.replay.buffer import TieredBuffer
from verl.replay.checkpoint_state import COMPONENT, FILE, VERSION, ReplayState, SharedShard
from verl.replay.disk_tier import SUFFIX, MappedShard, ReplayShard, index_name, read_index
from verl.utils.external_input import ExternalInputError, parse_mapping, whole_number

_log = logging.getLogger(__name__)


def buffer_state(buffer: TieredBuffer) -> ReplayState:
    """All rows, on the disk when this returns; what the disk refused comes along as bytes."""
    shards, refused = buffer.tail.seal()
    for shard in shards:
        buffer.shelf.add(shard, buffer.directory / shard.name)
    buffer.settle()
    entries, shared = [], {}
    for placed in buffer.shelf:
        is_far = placed.is_stored
        entries.append({**placed.shard.as_json(), "place": "cold" if is_far else "here"})
        name = index_name(placed.shard) if is_far else placed.shard.name
        path = buffer.directory / name
        leaves = hash_buffers([path.read_bytes()]) if is_far else placed.shard.leaves
        shared[name] = SharedShard(path, leaves)
    refused = [(shard, data) for shard, data in refused if shard.name not in shared]
    entries += [{**shard.as_json(), "place": "here"} for shard, _ in refused]
    index = buffer.index
    lost = index.first + np.flatnonzero(~index["is_there"])
    told = {
        "version": VERSION, "first": index.first, "end": index.end, "num_groups": buffer.num_groups,
        "num_steps": buffer.num_steps, "num_lost": buffer.num_lost, "lost": _ranges(lost), "shards": entries,
    }  # fmt: skip
    files = {FILE: (json.dumps(told) + "\n").encode(), **{shard.name: bytes(data) for shard, data in refused}}
    return ReplayState(files, shared)


def restore_buffer(buffer: TieredBuffer, directory: Path, verify: bool) -> None:
    """Fill an empty buffer with what a checkpoint holds: files are linked, or copied; the hot layer is read anew.

    Args:
        directory: `replay_buffer/` of a checkpoint.
        verify: hash the files; not needed where all of the checkpoint was hashed.
    Raises:
        ReplayCorrupt: rows are missing, or not what was written.
    """
    assert not len(buffer.index), "only an empty buffer takes another one's rows"
    told = _read(directory / FILE)
    index, out_of_reach = buffer.index, list[ReplayShard]()
    for entry in sorted(told["shards"], key=lambda entry: entry["first_row"]):
        place = entry.pop("place")
        shard = ReplayShard.from_json(entry)
        if not len(index):
            index.first = index.end = shard.first_row
        index.append(_lost_rows(shard.first_row - index.end), is_there=False)
        if place == "cold" and buffer.cold is None:
            out_of_reach.append(shard)
            index.append(read_index((directory / index_name(shard)).read_bytes()))
        else:
            index.append(_take_over(buffer, directory, shard, place == "cold", verify))
    index.append(_lost_rows(told["end"] - index.end), is_there=False)
    for first, end in told["lost"]:
        index.lose(first, end)
    index.drop_before(told["first"])
    buffer.num_groups, buffer.num_steps = told["num_groups"], told["num_steps"]
    buffer.num_lost = told["num_lost"]
    if num_lost := sum(index.lose(shard.first_row, shard.end) for shard in out_of_reach):
        buffer.num_lost += num_lost
        _log.warning(
            "%d replay rows are lost: they lie in an object storage, and this run has none. To have them, start "
            "it again from the same checkpoint with storage= as before.",
            num_lost,
        )
    buffer.fill_hot()


def cold_names(directory: Path) -> set[str]:
    """The shards in the store that checkpoints below a directory need."""
    told = [_read(file) for file in directory.glob(f"*/{COMPONENT}/{FILE}")]
    shards = [entry for one in told for entry in one["shards"] if entry.pop("place") == "cold"]
    return {ReplayShard.from_json(entry).name for entry in shards}


def _read(file: Path) -> dict[str, Any]:
    try:
        told = parse_mapping(file.read_bytes())
        if (version := whole_number(told.get("version"))) > VERSION:
            raise ReplayCorrupt(f"{file} is of version {version}: this verl reads up to {VERSION}")
        for key in ("first", "end", "num_groups", "num_steps", "num_lost"):
            whole_number(told.get(key))
        for first, end in told["lost"]:
            whole_number(whole_number(end) - whole_number(first))
        if not all(entry["place"] in ("here", "cold") for entry in told["shards"]):
            raise ReplayCorrupt(f"{file} lists a shard that is in no place that this verl knows")
        return told
    except (LookupError, TypeError, ExternalInputError) as error:
        raise ReplayCorrupt(f"{file} tells of no replay buffer ({type(error).__name__}: {error})") from error


def files_of(directory: Path) -> list[Path]:
    """The shards in a directory, in order of their rows, for who reads without a buffer."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if not path.name.endswith(".index.arrow"))


def _take_over(buffer: TieredBuffer, source: Path, shard: ReplayShard, is_far: bool, verify: bool) -> dict[str, Any]:
    """Put a shard on the shelf; what is known of its rows."""
    name = index_name(shard) if is_far else shard.name
    path = buffer.directory / name
    if not duplicate(buffer.disk, source / name, path):
        shutil.copyfile(source / name, path)
    if is_far:
        buffer.shelf.add(shard, None, is_stored=True)
        return read_index(path.read_bytes())
    if verify and hash_buffers([buffer.disk.map(path)]) != shard.leaves:
        raise ReplayCorrupt(f"{source / name} holds other bytes than were written")
    buffer.shelf.add(shard, path)
    return MappedShard(buffer.disk, path, shard).index()


def _lost_rows(count: int) -> dict[str, np.ndarray]:
    zeros = np.zeros(max(0, count))
    return dict.fromkeys(("group", "step", "policy_version", "score", "advantage"), zeros)


def _ranges(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Ascending numbers as ranges [first, end)."""
    if not len(numbers):
        return []
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
