"""The remote tier: old shards in object storage, uploaded and fetched by background threads.

demoted ── upload ──> confirmed ──> the local file is deleted
needed by the next step ── fetch ──> hashed ──> a temporary local file
                             │          └── altered or missing: rows are lost, and logged
                             └── no answer: other rows are sampled for now
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
KEPT_FILES = 4  # fetched shards that are kept for the next steps


class RemoteTier:
    """Shards in object storage.

    Args:
        store: with a prefix of this run.
        directory: for fetched files.
        timeout_s: the longest wait of `fetch`.
        retry_s: pause after a request without an answer.
    Attributes:
        lost: shards that are missing in the store, or differ from what was written.
    """

    def __init__(self, store: ObjectStore, directory: Path, timeout_s: float, retry_s: float):
        self.store, self._directory, self.disk = store, directory, FileSystem()
        self.timeout_s, self._retry_s = timeout_s, retry_s
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="replay_cold")
        self.uploads: dict[str, tuple[ReplayShard, Path, Future[int]]] = {}
        self._fetches: dict[str, tuple[ReplayShard, Future[Path]]] = {}
        self._here: dict[str, Path] = {}  # fetched files, least recently requested first
        self._silent_until = 0.0
        self.lost: list[ReplayShard] = []
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.iterdir():
            leftover.unlink()

    def upload(self, shard: ReplayShard, path: Path) -> None:
        """Start an upload, unless it is in progress or the store does not answer."""
        if shard.name not in self.uploads and self.is_reachable:
            future = self._threads.submit(self.store.put_file, _key(shard.name), path)
            self.uploads[shard.name] = shard, path, future

    def uploaded(self) -> list[ReplayShard]:
        """Shards whose uploads were confirmed since the last call; failed uploads can be started again."""
        done = []
        for name, (shard, path, future) in list(self.uploads.items()):
            if not future.done():
                continue
            del self.uploads[name]
            try:
                future.result()
                done.append(shard)
            except (StorageError, OSError) as error:
                if isinstance(error, StorageError) or path.exists():  # else the shard expired before its upload
                    self._fell_silent("does not take", shard, error)
        return done

    @property
    def is_reachable(self) -> bool:
        """Whether requests may be sent: no request failed within `retry_s`."""
        return time.monotonic() >= self._silent_until

    def want(self, shards: Iterable[ReplayShard]) -> None:
        """Start to fetch shards that are not local."""
        for shard in shards:
            if shard.name not in self._here and shard.name not in self._fetches and self.is_reachable:
                self._fetches[shard.name] = shard, self._threads.submit(self._fetch, shard)

    def fetch(self, shards: Iterable[ReplayShard]) -> dict[str, Path]:
        """Local files of shards by name, without those that could not be fetched in time.

        During the pause after a failed request, pending requests are not waited for.
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
        """Delete fetched files beyond `KEPT_FILES`; open maps of them stay valid."""
        for name in list(self._here)[: max(0, len(self._here) - KEPT_FILES)]:
            with contextlib.suppress(OSError):
                self.disk.unlink(self._here.pop(name))

    def delete(self, names: Iterable[str]) -> None:
        """Start to delete shards from the store."""
        for name in names:
            self._threads.submit(self._delete, name)

    def settle(self) -> None:
        """Wait for pending uploads, at most `timeout_s`."""
        wait([future for *_, future in self.uploads.values()], timeout=self.timeout_s)

    def close(self) -> None:
        """Cancel pending requests."""
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
        """Process a finished fetch."""
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
                "The storage %s %s; for %g s only local rows are sampled: %s", verb, shard.name, self._retry_s, error
            )
        self._silent_until = time.monotonic() + self._retry_s


def _key(name: str) -> str:
    return f"{PREFIX}/{name}"
