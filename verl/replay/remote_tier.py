"""The remote tier: old shards in object storage, uploaded and fetched by background threads.

old ── upload ──> confirmed ──> the local file is deleted
needed by the next step ── fetch ──> hashed ──> a temporary local file
                             │          └── altered or missing: rows are lost, and logged
                             └── no answer: other rows are sampled for now
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint.core.filesystem import FileSystem, write_by_rename
from verl.checkpoint.core.hashing import hash_buffers
from verl.errors import ObjectDamaged, ObjectNotFound, ReplayCorrupt, StorageError
from verl.replay.shard import Shard, ShardFile

if TYPE_CHECKING:
    from verl.storage.store import ObjectStore

_log = logging.getLogger(__name__)
PREFIX = "replay"


class RemoteTier:
    """Shards in object storage. Requests are kept with the shards, as `upload` and `fetch`.

    Args:
        store: with a prefix of this run.
        directory: for fetched files.
        timeout_s: the longest wait of `fetch`.
        retry_s: pause after a request without an answer.
    """

    def __init__(self, store: ObjectStore, directory: Path, timeout_s: float, retry_s: float):
        self.store, self._directory, self.disk = store, directory, FileSystem()
        self.timeout_s, self._retry_s = timeout_s, retry_s
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="replay_upload")  # and deletions, behind them
        self._fetches = ThreadPoolExecutor(2, thread_name_prefix="replay_fetch")
        self._paused_until = 0.0
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.iterdir():
            leftover.unlink()

    @property
    def is_reachable(self) -> bool:
        """Whether requests may be sent: no request failed within `retry_s`."""
        return time.monotonic() >= self._paused_until

    def upload(self, shard: Shard) -> bool:
        """Whether the store has confirmed the shard. Starts its upload if need be, and again after a failed one."""
        assert shard.file is not None
        assert shard.path is not None
        if shard.upload is None and self.is_reachable:
            shard.upload = self._uploads.submit(self.store.put_file, _key(shard.file.name), shard.path)
        if shard.upload is None or not shard.upload.done():
            return False
        try:
            shard.upload.result()
        except (StorageError, OSError) as error:
            shard.upload = None
            self._pause("does not take", shard.file, error)
            return False
        return True

    def start_fetches(self, shards: Iterable[Shard]) -> None:
        """Start to fetch shards whose rows are only in the store."""
        for shard in shards:
            assert shard.file is not None
            if shard.fetch is None and self.is_reachable:
                shard.fetch = self._fetches.submit(self.download, shard.file)

    def fetch(self, shards: list[Shard]) -> list[Shard]:
        """Fetch shards, and return those whose objects are missing or altered.

        Shards that did not come in time have no local file afterwards. During the pause after a failed request,
        pending requests are not waited for.
        """
        waits, lost = self.is_reachable, list[Shard]()
        self.start_fetches(shards)
        wait([shard.fetch for shard in shards if shard.fetch is not None], timeout=self.timeout_s if waits else 0)
        for shard in shards:
            file, fetch = shard.file, shard.fetch
            assert file is not None
            if fetch is None:
                continue
            if not fetch.done():
                if waits:
                    self._pause("does not give", file, f"no answer within {self.timeout_s:g} s")
                continue
            try:
                shard.moved_to(file, fetch.result())
            except (ObjectNotFound, ObjectDamaged, ReplayCorrupt) as error:
                _log.warning("%d replay rows are lost: %s", file.num_rows, error)
                lost.append(shard)
            except (StorageError, OSError) as error:
                shard.fetch = None
                self._pause("does not give", file, error)
        return lost

    def forget(self, shard: Shard) -> None:
        """Delete a fetched file; open maps of it stay valid."""
        if shard.file is not None and shard.fetch is not None and shard.fetch.done():
            shard.moved_to(shard.file, None)
            shard.fetch = None
            with contextlib.suppress(OSError):
                self.disk.unlink(self._directory / shard.file.name)

    def delete(self, names: Iterable[str]) -> None:
        """Start to delete shards from the store, after the uploads that were started before."""
        for name in names:
            self._uploads.submit(self._delete, name)

    def close(self) -> None:
        """Cancel pending requests."""
        for threads in (self._uploads, self._fetches):
            threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        for threads in (self._uploads, self._fetches):
            threads.shutdown(wait=True)

    def download(self, file: ShardFile) -> Path:
        """Copy a file from the store; returns its local path.

        Raises:
            ReplayCorrupt: the object differs from what was written.
        """
        data = self.store.get(_key(file.name), 0, file.size)
        if hash_buffers([data]) != file.leaves:
            raise ReplayCorrupt(f"{self.store.url(_key(file.name))} differs from what was written")
        path = self._directory / file.name
        write_by_rename(self.disk, path, bytes(data))
        return path

    def _delete(self, name: str) -> None:
        try:
            self.store.delete(_key(name))
        except StorageError as error:
            _log.warning("%s could not be deleted from the store, where it is no longer needed: %s", name, error)

    def _pause(self, verb: str, file: ShardFile, error: object) -> None:
        if self.is_reachable:
            _log.warning(
                "The storage %s %s; for %g s only local rows are sampled: %s", verb, file.name, self._retry_s, error
            )
        self._paused_until = time.monotonic() + self._retry_s


def _key(name: str) -> str:
    return f"{PREFIX}/{name}"
