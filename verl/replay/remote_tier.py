"""The remote tier: old shards in object storage, uploaded and fetched by threads while training goes on.

demoted ── upload ──> confirmed ──> the local file goes
drawn ahead ── fetch ──> hashed ──> a local file for a while
             └── no answer: others are drawn for now     └── altered or missing: lost, and reported
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint.core.filesystem import FileSystem, write_file
from verl.checkpoint.core.hashing import hash_buffers
from verl.errors import ObjectDamaged, ObjectNotFound, ReplayCorrupt, StorageError
from verl.replay.disk_tier import UNFINISHED, ReplayShard

if TYPE_CHECKING:
    from verl.storage.store import ObjectStore

_log = logging.getLogger(__name__)
PREFIX = "replay"
KEPT_FILES = 4  # fetched shards that stay here for the steps to come


class RemoteTier:
    """Shards in a store.

    Args:
        store: its own prefix says whose.
        directory: for fetched files.
        timeout_s: that `fetch` waits.
        retry_s: after a request that was not answered, how long none is made.
    Attributes:
        lost: shards that the store turned out not to hold as they were written.
    """

    def __init__(self, store: ObjectStore, directory: Path, timeout_s: float, retry_s: float):
        self.store, self._directory, self.disk = store, directory, FileSystem()
        self.timeout_s, self._retry_s = timeout_s, retry_s
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="replay_cold")
        self.uploads: dict[str, tuple[ReplayShard, Path, Future[int]]] = {}
        self._fetches: dict[str, tuple[ReplayShard, Future[Path]]] = {}
        self._here: dict[str, Path] = {}  # fetched, the one asked for last at the end
        self._silent_until = 0.0
        self.lost: list[ReplayShard] = []
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.iterdir():
            leftover.unlink()

    def upload(self, shard: ReplayShard, path: Path) -> None:
        """Begin to bring a file there, unless it is on its way or the store does not answer."""
        if shard.name not in self.uploads and self.is_reachable:
            future = self._threads.submit(self.store.put_file, _key(shard.name), path)
            self.uploads[shard.name] = shard, path, future

    def uploaded(self) -> list[ReplayShard]:
        """Shards that the store has confirmed since the last call; what it refused is forgotten, to be begun again."""
        done = []
        for name, (shard, path, future) in list(self.uploads.items()):
            if not future.done():
                continue
            del self.uploads[name]
            try:
                future.result()
                done.append(shard)
            except (StorageError, OSError) as error:
                if isinstance(error, StorageError) or path.exists():  # else it expired before its turn came
                    self._fell_silent("does not take", shard, error)
        return done

    @property
    def is_reachable(self) -> bool:
        """Whether it may be asked."""
        return time.monotonic() >= self._silent_until

    def want(self, shards: Iterable[ReplayShard]) -> None:
        """Begin to fetch shards that are not here."""
        for shard in shards:
            if shard.name not in self._here and shard.name not in self._fetches and self.is_reachable:
                self._fetches[shard.name] = shard, self._threads.submit(self._fetch, shard)

    def fetch(self, shards: Iterable[ReplayShard]) -> dict[str, Path]:
        """The files of shards by name, without those that could not be had in time.

        While the store is left alone, a request that it has not answered yet is not waited for.
        """
        wanted, waits = {shard.name: shard for shard in shards}, self.is_reachable
        self.want(wanted.values())
        waiting = [self._fetches[name][1] for name in wanted if name in self._fetches]
        wait(waiting, timeout=self.timeout_s if waits else 0)
        for name in list(self._fetches):
            self._hear(name, waits and name in wanted)
        for name in [*wanted]:
            if name in self._here:
                self._here[name] = self._here.pop(name)
        return {name: self._here[name] for name in wanted if name in self._here}

    def forget(self) -> None:
        """Let go of fetched files beyond a few; who has mapped one may read on."""
        for name in list(self._here)[: max(0, len(self._here) - KEPT_FILES)]:
            with contextlib.suppress(OSError):
                self.disk.unlink(self._here.pop(name))

    def delete(self, names: Iterable[str]) -> None:
        """Begin to delete shards that nobody needs."""
        for name in names:
            self._threads.submit(self._delete, name)

    def settle(self) -> None:
        """Wait for uploads under way, as long as for a fetch."""
        wait([future for *_, future in self.uploads.values()], timeout=self.timeout_s)

    def close(self) -> None:
        """Give up what is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        self._threads.shutdown(wait=True)

    def _fetch(self, shard: ReplayShard) -> Path:
        data = self.store.get(_key(shard.name), 0, shard.size)
        if hash_buffers([data]) != shard.leaves:
            raise ReplayCorrupt(f"{self.store.url(_key(shard.name))} differs from what was written")
        path, unfinished = self._directory / shard.name, self._directory / (shard.name + UNFINISHED)
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(unfinished)
        write_file(self.disk, unfinished, [data])
        self.disk.rename(unfinished, path)
        return path

    def _delete(self, name: str) -> None:
        try:
            self.store.delete(_key(name))
        except StorageError as error:
            _log.warning("%s could not be deleted from the store, where it is no longer needed: %s", name, error)

    def _hear(self, name: str, is_wanted: bool) -> None:
        """What became of a fetch, if anything did."""
        shard, future = self._fetches[name]
        if not future.done():
            if is_wanted:
                self._fell_silent("does not give", shard, f"no answer within {self.timeout_s:g} s")
            return
        del self._fetches[name]
        try:
            self._here[name] = future.result()
        except (ObjectNotFound, ObjectDamaged, ReplayCorrupt) as error:
            _log.warning("%d replay rows are lost: %s", shard.num_rows, error)
            self.lost.append(shard)
        except (StorageError, OSError) as error:
            self._fell_silent("does not give", shard, error)

    def _fell_silent(self, verb: str, shard: ReplayShard, error: object) -> None:
        if self.is_reachable:
            _log.warning(
                "The storage %s %s; for %g s only local rows are drawn: %s", verb, shard.name, self._retry_s, error
            )
        self._silent_until = time.monotonic() + self._retry_s


def _key(name: str) -> str:
    return f"{PREFIX}/{name}"
