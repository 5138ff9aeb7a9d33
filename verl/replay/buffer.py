"""TieredBuffer: a replay buffer of scored rows, the newest in device memory, most on disk, the oldest in object
storage.

append ──> hot (a copy of the newest, on the device)
      └──> open shard ── full ──> file on disk (warm) ── old ──> storage (cold) ── oldest ──> deleted

One index names all rows and the shards that hold them, wherever these are. Rows and groups (the responses to one
prompt) are numbered from the start of the buffer. What is sampled depends on these numbers, the run's seed and the
step, not on where rows are stored nor on the number of processes.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from verl.checkpoint.core.filesystem import FileSystem, duplicate
from verl.checkpoint.core.hashing import hash_buffers
from verl.checkpoint.save.save_request import ExistingFile
from verl.protocol import DataProto
from verl.replay.arrow_rows import INDEX, DeviceRows, SelectedRows, copied, rows_from_arrow, rows_to_arrow
from verl.replay.config import COMPONENT, MIB, ReplayRequest, TieredReplay, choose
from verl.replay.remote_tier import RemoteTier
from verl.replay.shard import (
    FILE,
    VERSION,
    RowIndex,
    SavedBuffer,
    Shard,
    ShardFile,
    read_index,
    read_saved,
    split_rows,
    write_index,
)
from verl.utils.main_memory import give_back

_log = logging.getLogger(__name__)


class HotTier:
    """Copies of the newest rows in device memory; on the CPU the record batches themselves.

    Args:
        limit_bytes: total size; the oldest record batches are dropped beyond it.
    """

    def __init__(self, device: torch.device, limit_bytes: int):
        self._device, self._limit_bytes = device, limit_bytes
        self._records: deque[tuple[int, pa.RecordBatch | DeviceRows]] = deque()  # with their first rows
        self.num_bytes = 0

    def first(self, end: int) -> int:
        """Number of the oldest row; `end` if the buffer is empty."""
        return self._records[0][0] if self._records else end

    def append(self, first_row: int, record: pa.RecordBatch) -> None:
        """Add the newest rows."""
        rows = record if self._device.type == "cpu" else DeviceRows(record, self._device)
        self._records.append((first_row, rows))
        self.num_bytes += rows.nbytes
        while self.num_bytes > self._limit_bytes:
            self._drop_oldest()

    def drop_before(self, row: int) -> None:
        """Drop the record batches that end before this row."""
        while self._records and self._records[0][0] + self._records[0][1].num_rows <= row:
            self._drop_oldest()

    def select(self, rows: np.ndarray) -> Iterator[SelectedRows]:
        """Yield rows by number, ascending."""
        for at, part in split_rows(rows, [first for first, _ in self._records]):
            first, record = self._records[at]
            rows_of = record.select if isinstance(record, DeviceRows) else partial(SelectedRows, record)
            yield rows_of(part - first)

    def _drop_oldest(self) -> None:
        self.num_bytes -= self._records.popleft()[1].nbytes


class TieredBuffer:
    """Scored rows of a run. Its methods are called by one thread.

    Args:
        settings: sizes of the tiers, and sampling.
        directory: for its files; no other process may write there. Files of an earlier buffer are removed: their rows
            are in checkpoints, or newer than the last one.
        device: of the hot tier.
        seed: of the run.
        cold: the remote tier; None keeps the oldest rows on the disk.
        disk: the file system.
    Attributes:
        index: all rows, and the shards that hold them.
        num_steps: calls of `append` with rows, including those before a resume.
        num_lost: rows that could not be read.
        released: names of shards in the store that the buffer no longer needs.
    """

    def __init__(
        self,
        settings: TieredReplay,
        directory: Path,
        device: str = "cpu",
        seed: int = 0,
        cold: RemoteTier | None = None,
        disk: FileSystem | None = None,
    ):
        self.settings, self.directory, self.seed, self.cold = settings, directory, seed, cold
        self.disk, self.index = disk or FileSystem(), RowIndex()
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("rows_*"):
            leftover.unlink(missing_ok=True)
        memory = settings.memory_mib * MIB  # the rest is for files being written, and the index
        self._unwritten_limit = memory // 4
        self._hot = HotTier(torch.device(device), memory // 4)
        self.num_groups = self.num_steps = self.num_lost = 0
        self.released: list[str] = []
        self._unused_files: list[Path] = []  # a save in progress may still need them
        self._writers = ThreadPoolExecutor(2, thread_name_prefix="replay_shards")  # one hashes while one syncs

    def __len__(self) -> int:
        return int(self.index["is_there"].sum())

    # -- adding rows --------------------------------------------------------------------------------------------------

    def append(self, batch: DataProto, step: int) -> None:
        """Append scored rows. They are written to the disk in the background.

        Args:
            batch: prompts, responses, group_ids, policy_version, rollout_log_probs, token_level_scores, response_mask,
                attention_mask, advantages, and any other fields that an update needs.
            step: training step of the rows.
        Raises:
            ReplayError: the disk refused rows of this or an earlier step.
        """
        if not len(batch):
            return
        batch, groups = _adjacent(batch)
        mask = batch["response_mask"]
        record = rows_to_arrow(
            batch,
            {
                "group": groups + self.num_groups,
                "step": np.full(len(batch), step, dtype=np.int64),
                "score": _sums(batch["token_level_scores"], mask),
                "advantage": _sums(batch["advantages"].abs(), mask) / np.maximum(mask.sum(1).cpu().numpy(), 1),
            },
        )
        first_row = self.index.end
        self.index.append({name: record.column(name).to_numpy() for name in INDEX})
        self._hot.append(first_row, record)
        self._hot.drop_before(self.index.end - self.settings.hot_rows)
        shards = self.index.shards
        if not shards or not shards[-1].accepts(record.schema):
            self._start_writes()
            shards.append(Shard(first_row))
        shards[-1].append(record)
        if shards[-1].num_bytes >= self.settings.shard_mib * MIB:
            self._start_writes()
        self._limit_memory()
        self.num_groups += int(groups[-1]) + 1
        self.num_steps += 1
        self.settle()

    def settle(self) -> None:
        """Process finished background work, and move rows between tiers."""
        self._collect_files()
        self._expire()
        if self.cold is not None:
            self._demote(self.cold)

    def flush(self) -> None:
        """Write all rows, and wait."""
        self._start_writes()
        for shard in self._unwritten:
            shard.written()
        self.settle()

    def sweep(self) -> None:
        """Delete files that the buffer no longer needs. Not to be called during a save, which may need them."""
        for path in self._unused_files:
            try:
                self.disk.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("%s could not be removed: %s", path, error)
        self._unused_files = []

    # -- sampling -----------------------------------------------------------------------------------------------------

    def prefetch(self, request: ReplayRequest) -> None:
        """Start to fetch the shards of the rows that `sample` would return now."""
        if self.cold is not None and self.cold.is_reachable and self._is_warmed_up:
            rows = self._choose(request, np.zeros(len(self.index), dtype=bool))
            self.cold.start_fetches(self._remote(rows))

    def sample(self, request: ReplayRequest, pad_token_id: int = 0) -> DataProto | None:
        """Sample rows of earlier steps, oldest first, with the fields that were stored.

        Args:
            request: number of rows, step and limits.
            pad_token_id: padding of prompts and responses.
        Returns:
            The rows, with `group_ids` renumbered from 0; None if no row is eligible.
        """
        if not self._is_warmed_up:
            return None
        left_out = np.zeros(len(self.index), dtype=bool)
        rows = self._choose(request, left_out)
        while self.cold is not None and (remote := self._remote(rows)):
            for shard in self.cold.fetch(remote):
                self.num_lost += self.index.lose(shard.first_row, shard.end)
            for shard in remote:
                left_out[self.index.span(shard.first_row, shard.end)] = shard.is_remote
            rows = self._choose(request, left_out)  # replaces rows that could not be fetched
        if self.cold is not None:
            needed = {shard for shard, _ in self.index.holding(rows)}
            for shard in self.index.shards:
                if shard.is_stored and shard not in needed:  # fetched for an earlier step
                    self.cold.forget(shard)
        if not len(rows):
            return None
        groups = np.unique(self.index["group"][rows - self.index.first], return_inverse=True)[1]
        batch = self.rows(rows, pad_token_id)
        give_back()
        return batch.union(DataProto.from_dict({"group_ids": torch.from_numpy(groups.astype(np.int64))}))

    def rows(self, numbers: np.ndarray, pad_token_id: int = 0) -> DataProto:
        """Rows by number, ascending; they must be in memory or in local files.

        Raises:
            ReplayCorrupt: a file differs from what was written.
        """
        is_hot = numbers >= self._hot_first
        in_shards = [
            part for shard, rows in self.index.holding(numbers[~is_hot]) for part in shard.select(self.disk, rows)
        ]
        return rows_from_arrow([*in_shards, *self._hot.select(numbers[is_hot])], pad_token_id)

    def iterate(self, size: int, rank: int = 0, world_size: int = 1, pad_token_id: int = 0) -> Iterator[DataProto]:
        """Yield all local rows, oldest first, in batches of `size`; each of `world_size` ranks gets a share of the
        shards.
        """
        for shard in [shard for shard in self.index.shards[rank::world_size] if not shard.is_remote]:
            numbers = np.arange(max(shard.first_row, self.index.first), shard.end)
            numbers = numbers[self.index["is_there"][numbers - self.index.first]]
            for begin in range(0, len(numbers), size):
                yield self.rows(numbers[begin : begin + size], pad_token_id)

    def stats(self) -> dict[str, float]:
        """Row counts by tier; see docs/metrics.md."""
        hot = self.index.end - self._hot_first
        cold = sum(shard.num_rows for shard in self.index.shards if shard.is_stored)
        return {
            "replay/rows": float(len(self)),
            "replay/rows_hot": float(hot),
            "replay/rows_warm": float(max(0, len(self) - hot - cold)),
            "replay/rows_cold": float(cold),
            "replay/lost_rows": float(self.num_lost),
            "replay/memory_mib": (self._hot.num_bytes + self.unwritten_bytes) / MIB,
        }

    def close(self) -> None:
        """Stop the threads. The files remain."""
        self._writers.shutdown(wait=True, cancel_futures=True)
        if self.cold is not None:
            self.cold.close()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, bytes | ExistingFile]:
        """Files of a checkpoint by name. All rows are written to disk first."""
        self.flush()
        files = [file for shard in self.index.shards if (file := shard.file) is not None]
        state: dict[str, bytes | ExistingFile] = {}
        for file in files:
            name, leaves = file.name, file.leaves
            if file.place == "cold":
                name = file.index_name
                leaves = hash_buffers([(self.directory / name).read_bytes()])
            state[name] = ExistingFile(path=f"{COMPONENT}/{name}", source=self.directory / name, leaves=leaves)
        index = self.index
        lost = index.first + np.flatnonzero(~index["is_there"])
        saved = SavedBuffer(
            version=VERSION, first=index.first, end=index.end, num_groups=self.num_groups, num_steps=self.num_steps,
            num_lost=self.num_lost, lost=_ranges(lost), shards=tuple(files),
        )  # fmt: skip
        return {FILE: saved.as_json(), **state}

    def load_state_dict(self, directory: Path) -> None:
        """Restore an empty buffer from a checkpoint: files are linked or copied, and the hot tier is read from them.

        Args:
            directory: `replay_buffer/` of a checkpoint, whose files were verified.
        Raises:
            ReplayCorrupt: rows are missing, or a file is cut short.
        """
        assert not len(self.index), "only an empty buffer can be restored"
        saved, index, out_of_reach = read_saved(directory / FILE), self.index, list[Shard]()
        for file in sorted(saved.shards, key=lambda file: file.first_row):
            index.skip_to(file.first_row)
            is_stored = file.place == "cold"
            name = file.index_name if is_stored else file.name
            path, shard = self.directory / name, Shard(file.first_row, file)
            if not duplicate(self.disk, directory / name, path):
                shutil.copyfile(directory / name, path)
            if is_stored:
                index.append(read_index(path.read_bytes()))
            else:
                shard.path = path
                index.append(shard.index(self.disk))
            if is_stored and self.cold is None:
                out_of_reach.append(shard)
                self._unused_files.append(path)
            else:
                index.shards.append(shard)
        index.skip_to(saved.end)
        for first, end in saved.lost:
            index.lose(first, end)
        index.drop_before(saved.first)
        self.num_groups, self.num_steps, self.num_lost = saved.num_groups, saved.num_steps, saved.num_lost
        if num_lost := sum(index.lose(shard.first_row, shard.end) for shard in out_of_reach):
            self.num_lost += num_lost
            _log.warning(
                "%d replay rows are lost: they are in object storage, and this run has none. To restore them, resume "
                "from the same checkpoint with storage= as before.",
                num_lost,
            )
        self._fill_hot()

    def _fill_hot(self) -> None:
        """Read the newest rows from files into device memory."""
        newest = np.arange(max(self.index.first, self.index.end - self.settings.hot_rows), self.index.end)
        for shard, rows in self.index.holding(newest):
            if shard.path is None:
                self._hot.drop_before(self.index.end)
                continue
            first = int(rows[0])
            for part in shard.select(self.disk, rows[rows < shard.end]):
                self._hot.append(first, copied(part.record, part.rows))
                part.release()
                first += len(part.rows)

    # -- where rows are -----------------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        """Size of the rows that are not in a file yet."""
        return sum(shard.num_bytes for shard in self._unwritten)

    @property
    def _unwritten(self) -> list[Shard]:
        return [shard for shard in self.index.shards if shard.file is None]

    @property
    def _is_warmed_up(self) -> bool:
        return self.num_steps >= self.settings.buffer_warmup_steps

    @property
    def _hot_first(self) -> int:
        return self._hot.first(self.index.end)

    def _choose(self, request: ReplayRequest, left_out: np.ndarray) -> np.ndarray:
        settings = self.settings
        return choose(self.index, request, left_out, settings.sampling, settings.recency_half_life, self.seed)

    def _remote(self, rows: np.ndarray) -> list[Shard]:
        """Shards of these rows that are only in the store."""
        rows = rows[rows < self._hot_first]
        return [shard for shard, _ in self.index.holding(rows) if shard.is_remote]

    # -- writing shards -----------------------------------------------------------------------------------------------

    def _start_writes(self) -> None:
        for shard in self._unwritten:
            if shard.writing is None:
                shard.writing = self._writers.submit(shard.write, self.disk, self.directory)

    def _collect_files(self) -> None:
        """Read shards from their files once these are written."""
        num_files = 0
        for shard in self._unwritten:
            if shard.writing is None or not shard.writing.done():
                break
            file = shard.written()
            shard.moved_to(file, self.directory / file.name)
            num_files += 1
        if num_files:
            give_back()

    def _limit_memory(self) -> None:
        """Wait for the disk if memory is full."""
        if self.unwritten_bytes > self._unwritten_limit and self._unwritten[0].writing is not None:
            self._unwritten[0].written()

    # -- moving shards between tiers ----------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Drop the oldest rows beyond `max_rows`, in whole groups."""
        index, surplus = self.index, len(self.index) - self.settings.max_rows
        if surplus <= 0:
            return
        groups = index["group"]
        dropped = index.drop_before(index.first + int(np.searchsorted(groups, groups[surplus - 1], side="right")))
        self._hot.drop_before(index.first)
        for shard in dropped:
            assert shard.file is not None
            if shard.is_stored:
                self.released.append(shard.file.name)
                self._unused_files.append(self.directory / shard.file.index_name)
            else:
                self._leave_file(shard, shard.file)
            if self.cold is not None and shard.is_stored:
                self.cold.forget(shard)
            elif shard.upload is not None:  # deleted in the store once that is over
                self.released.append(shard.file.name)

    def _demote(self, cold: RemoteTier) -> None:
        """Upload the oldest shards to the store; local files are deleted once it has confirmed them."""
        for shard in self.index.shards:
            if shard.end > self.index.end - self.settings.near_rows:
                break
            if shard.path is None or shard.file is None or shard.is_stored or not cold.upload(shard):
                continue
            try:
                write_index(self.disk, self.directory / shard.file.index_name, shard.index(self.disk))
            except OSError:
                continue  # waits until there is room
            self._leave_file(shard, replace(shard.file, place="cold"))

    def _leave_file(self, shard: Shard, file: ShardFile) -> None:
        """Forget the local file of a shard; the next `sweep` deletes it."""
        if shard.path is not None:
            self._unused_files.append(shard.path)
            shard.moved_to(file, None)


def _sums(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Sum of each row of [B T] over its mask, in float64."""
    return np.asarray(np.sum(x.cpu().double().numpy(), axis=1, where=mask.cpu().numpy()))


def _adjacent(batch: DataProto) -> tuple[DataProto, np.ndarray]:
    """The rows sorted by group, and the group number of each row, from 0."""
    labels = batch["group_ids"].cpu().numpy()
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))[inverse]
    order = np.argsort(ranks, kind="stable")
    if (order != np.arange(len(order))).any():
        batch = batch[torch.from_numpy(order)]
    return batch, ranks[order]


def _ranges(numbers: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Convert ascending numbers to ranges [first, end)."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts if len(part))
