"""TieredBuffer: a replay buffer of scored rows, the newest in device memory, most on disk, the oldest in object
storage.

append ──> hot (the newest, on the device)      sample <── weighted sampling over all eligible rows
      └──> write buffer ── full ──> shard on disk (warm) ── old ──> storage (cold) ── oldest ──> deleted

Rows and groups (the responses to one prompt) are numbered from the start of the buffer. What is sampled depends on
these numbers, the run's seed and the step, not on where rows are stored nor on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from verl.checkpoint.core.filesystem import FileSystem
from verl.protocol import DataProto
from verl.replay.arrow_rows import INDEX, RowSegment, SegmentRows, rows_from_arrow, rows_to_arrow
from verl.replay.config import MIB, TieredReplay
from verl.replay.disk_tier import DiskTier, ReplayShard, ShardLocation, index_file, index_name, write_bytes
from verl.replay.remote_tier import RemoteTier
from verl.replay.sampling import ReplayRequest, RowIndex, draw, weights_of
from verl.replay.write_buffer import MemoryTier, WriteBuffer
from verl.utils.memory import give_back


class TieredBuffer:
    """Scored rows of a run. Its methods are called by one thread.

    Args:
        settings: sizes of the tiers, and sampling.
        directory: for its files; no other process may write there.
        device: of the hot tier.
        seed: of the run.
        cold: the remote tier; None keeps the oldest rows on the disk.
        disk: the file system.
    Attributes:
        num_steps: calls of `append` with rows, including those before a resume.
        num_lost: rows that could not be written or read.
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
        self.disk, self._device = disk or FileSystem(), torch.device(device)
        directory.mkdir(parents=True, exist_ok=True)
        memory = settings.memory_mib * MIB
        self.index, self.disk_tier, self._hot = RowIndex(), DiskTier(self.disk, memory // 8), MemoryTier()
        self.write_buffer = WriteBuffer(self.disk, directory, settings.shard_mib * MIB, memory // 4)
        self._hot_bytes = memory // 4  # the rest is for the shard being written, the index, and a sampled batch
        self.num_groups = self.num_steps = self.num_lost = 0
        self.released: list[str] = []
        self._confirmed: set[str] = set()  # shards confirmed by the store whose local files are still needed

    def __len__(self) -> int:
        return int(self.index["is_there"].sum())

    # -- putting in ---------------------------------------------------------------------------------------------------

    def append(self, batch: DataProto, step: int) -> None:
        """Append scored rows. They are written to the disk in the background.

        Args:
            batch: prompts, responses, group_ids, policy_version, rollout_log_probs, token_level_scores, response_mask,
                attention_mask, advantages, and any other fields that an update needs.
            step: training step of the rows.
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
        self._into_hot(first_row, RowSegment.of(record))
        if (given_up := self.write_buffer.add(first_row, record)) is not None:
            self.num_lost += self.index.lose(*given_up)
        self.num_groups += int(groups[-1]) + 1
        self.num_steps += 1
        self.settle()

    def settle(self) -> None:
        """Process finished background work, and move rows between tiers."""
        if written := self.write_buffer.collect():
            for shard in written:
                self.disk_tier.add(shard, self.directory / shard.name)
            give_back()
        self._expire()
        if self.cold is not None:
            self._demote(self.cold)

    # -- taking out ---------------------------------------------------------------------------------------------------

    def prefetch(self, wanted: ReplayRequest) -> None:
        """Start to fetch the shards of the rows that `sample` would return now."""
        if self.cold is not None and self.cold.is_reachable and self._is_warmed_up:
            rows = self._chosen(wanted, np.zeros(len(self.index), dtype=bool))
            self.cold.want(placed.shard for placed, _ in self._far(rows))

    def sample(self, wanted: ReplayRequest, pad_token_id: int = 0) -> DataProto | None:
        """Sample rows of earlier steps, oldest first, with the fields that were stored.

        Args:
            wanted: number of rows, step and limits.
            pad_token_id: padding of prompts and responses.
        Returns:
            The rows, with `group_ids` renumbered from 0; None if no row is eligible.
        """
        if not self._is_warmed_up:
            return None
        left_out = np.zeros(len(self.index), dtype=bool)
        rows = self._chosen(wanted, left_out)
        if self.cold is not None and any(self._far(rows)):
            self._leave_fetched(self.cold)
        while self.cold is not None and (far := list(self._far(rows))):
            for placed in self._bring(self.cold, [placed for placed, _ in far]):
                left_out[self._span(placed.shard)] = True
            rows = self._chosen(wanted, left_out)  # replaces rows that could not be fetched
        if not len(rows):
            return None
        groups = np.unique(self.index["group"][rows - self.index.first], return_inverse=True)[1]
        found = self.rows(rows, pad_token_id)
        give_back()
        return found.union(DataProto.from_dict({"group_ids": torch.from_numpy(groups.astype(np.int64))}))

    def rows(self, numbers: np.ndarray, pad_token_id: int = 0) -> DataProto:
        """Rows by number, in the order given; they must be in memory or in local files.

        Raises:
            ReplayCorrupt: a file differs from what was written.
        """
        return rows_from_arrow(list(self._parts(numbers)), pad_token_id, self.disk_tier.touched)

    def iterate(self, size: int, rank: int = 0, world_size: int = 1, pad_token_id: int = 0) -> Iterator[DataProto]:
        """Yield all local rows, oldest first, in batches of `size`; each of `world_size` ranks gets a share of the
        shards.
        """
        for number, (first, end, is_far) in enumerate(self._stretches()):
            if is_far or number % world_size != rank:
                continue
            numbers = np.arange(max(first, self.index.first), end)
            numbers = numbers[self.index["is_there"][numbers - self.index.first]]
            for begin in range(0, len(numbers), size):
                yield self.rows(numbers[begin : begin + size], pad_token_id)

    def stats(self) -> dict[str, float]:
        """Row counts by tier; see docs/metrics.md."""
        hot = self.index.end - self._hot_first
        far = sum(placed.shard.num_rows for placed in self.disk_tier if placed.is_stored)
        return {
            "replay/rows": float(len(self)),
            "replay/rows_hot": float(hot),
            "replay/rows_warm": float(max(0, len(self) - hot - far)),
            "replay/rows_cold": float(far),
            "replay/lost_rows": float(self.num_lost),
            "replay/memory_mib": (self._hot.num_bytes + self.write_buffer.num_bytes) / MIB,
        }

    def fill_hot(self) -> None:
        """Read the newest rows from files into device memory, after a restart."""
        for placed in reversed(self.disk_tier.placed):
            if placed.path is None:
                return
            opened = self.disk_tier.opened(placed)
            for start, segment in zip(reversed(opened.starts.tolist()), reversed(opened.segments)):
                end = placed.first_row + start + segment.num_rows
                if (count := end - (self.index.end - self.settings.hot_rows)) <= 0:
                    return
                kept = segment.last(min(segment.num_rows, count))
                if self._hot.num_bytes + kept.num_bytes > self._hot_bytes:
                    return
                on_device = kept if self._device.type == "cpu" else kept.to(self._device)
                self._hot.prepend(end - kept.num_rows, on_device)

    def close(self) -> None:
        """Write the remaining rows to disk and stop the threads. The files remain."""
        self.write_buffer.seal()
        self.write_buffer.close()
        if self.cold is not None:
            self.cold.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_warmed_up(self) -> bool:
        return self.num_steps >= self.settings.buffer_warmup_steps

    @property
    def _hot_first(self) -> int:
        return self.index.end if self._hot.first is None else self._hot.first

    def _into_hot(self, first_row: int, segment: RowSegment) -> None:
        on_device = segment if self._device.type == "cpu" else segment.to(self._device)
        self._hot.append(first_row, on_device)
        self._hot.drop_before(self.index.end - self.settings.hot_rows)
        self._hot.trim(self._hot_bytes)

    def _span(self, shard: ReplayShard) -> slice:
        """The slice of a shard in the columns of the index."""
        return slice(max(0, shard.first_row - self.index.first), max(0, shard.end - self.index.first))

    def _chosen(self, wanted: ReplayRequest, left_out: np.ndarray) -> np.ndarray:
        """Numbers of the sampled rows, ascending."""
        index, settings = self.index, self.settings
        staleness = wanted.version - index["policy_version"].astype(np.int64)
        fits = index["is_there"] & ~left_out
        if wanted.max_staleness is not None:
            fits &= staleness <= wanted.max_staleness
        numbers, sizes = np.arange(index.first, index.end), np.ones(len(index), dtype=np.int64)
        heads, advantage = np.arange(len(index)), np.abs(index["advantage"])
        if wanted.whole_groups and len(index):
            groups = index["group"]
            heads = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
            sizes = np.diff(heads, append=len(index))
            fits, staleness = np.logical_and.reduceat(fits, heads), np.maximum.reduceat(staleness, heads)
            advantage, numbers = np.add.reduceat(advantage, heads) / sizes, groups[heads]
        (able,) = np.nonzero(fits)
        weights = weights_of(settings.sampling, staleness[able], advantage[able], settings.recency_half_life)
        taken = able[draw(numbers[able], weights, sizes[able], wanted.num_rows, self.seed, wanted.step)]
        spans = [np.arange(first, first + size) for first, size in zip(heads[taken].tolist(), sizes[taken].tolist())]
        return index.first + np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def _parts(self, numbers: np.ndarray) -> Iterator[SegmentRows]:
        places, unwritten_first = np.arange(len(numbers)), self.write_buffer.first
        is_hot = numbers >= self._hot_first
        in_write_buffer = ~is_hot & (numbers >= (self.index.end if unwritten_first is None else unwritten_first))
        for layer, is_here in (
            (self._hot, is_hot),
            (self.write_buffer, in_write_buffer),
            (self.disk_tier, ~is_hot & ~in_write_buffer),
        ):
            if is_here.any():
                yield from layer.find(numbers[is_here], places[is_here])

    def _far(self, rows: np.ndarray) -> Iterator[tuple[ShardLocation, np.ndarray]]:
        """Shards of these rows that are only in the store, with a mask of their rows."""
        in_shards = rows[
            rows < min(self._hot_first, self.index.end if self.write_buffer.first is None else self.write_buffer.first)
        ]
        if len(in_shards):
            yield from ((placed, has) for placed, has in self.disk_tier.holding(in_shards) if placed.path is None)

    def _bring(self, cold: RemoteTier, placed: list[ShardLocation]) -> list[ShardLocation]:
        """Fetch shards; returns those that could not be fetched."""
        paths = cold.fetch([one.shard for one in placed])
        for one in placed:
            one.path = paths.get(one.shard.name)
        for shard in cold.lost:
            self.num_lost += self.index.lose(shard.first_row, shard.end)
        cold.lost.clear()
        return [one for one in placed if one.path is None]

    def _leave_fetched(self, cold: RemoteTier) -> None:
        """Drop the files that were fetched for earlier steps."""
        for one in self.disk_tier:
            if one.is_stored and one.path is not None:
                one.path = one.mapped = None
        cold.forget()

    def _expire(self) -> None:
        """Drop the oldest rows beyond `max_rows`, in whole groups."""
        index, surplus = self.index, len(self.index) - self.settings.max_rows
        if surplus <= 0:
            return
        groups = index["group"]
        index.drop_before(index.first + int(np.searchsorted(groups, groups[surplus - 1], side="right")))
        self._hot.drop_before(index.first)
        stored = self.disk_tier.drop_before(index.first)
        self.released += [shard.name for shard in stored]
        self.disk_tier.to_delete += [self.directory / index_name(shard) for shard in stored]

    def _demote(self, cold: RemoteTier) -> None:
        """Upload the oldest shards to the store; local files are deleted once it has confirmed them."""
        self._confirmed |= {shard.name for shard in cold.uploaded()}
        expired = self._confirmed - {placed.shard.name for placed in self.disk_tier}  # expired during their upload
        self.released += sorted(expired)
        self._confirmed -= expired
        for placed in self.disk_tier:
            if placed.shard.end > self.index.end - self.settings.near_rows:
                break
            if placed.path is None or placed.is_stored:
                continue
            if placed.shard.name not in self._confirmed:
                cold.upload(placed.shard, placed.path)
                continue
            index = index_file(self.disk_tier.opened(placed).index())
            try:
                write_bytes(self.disk, self.directory / index_name(placed.shard), index)
            except OSError:
                continue  # waits until there is room
            self._confirmed.remove(placed.shard.name)
            placed.is_stored = True
            self.disk_tier.leave(placed)

    def _stretches(self) -> list[tuple[int, int, bool]]:
        """(first row, end, only in the store?) of each shard, and of the rows in no shard yet."""
        found = [(placed.first_row, placed.shard.end, placed.path is None) for placed in self.disk_tier]
        return found if self.write_buffer.first is None else [*found, (self.write_buffer.first, self.index.end, False)]


def _sums(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Sum of each row of [B T] over its mask, in float64."""
    return torch.where(mask, x, 0.0).sum(dim=1, dtype=torch.float64).cpu().numpy()


def _adjacent(batch: DataProto) -> tuple[DataProto, np.ndarray]:
    """The rows sorted by group, and the group number of each row, from 0."""
    labels = batch["group_ids"].cpu().numpy()
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))[inverse]
    order = np.argsort(ranks, kind="stable")
    if (order != np.arange(len(order))).any():
        batch = batch[torch.from_numpy(order)]
    return batch, ranks[order]
