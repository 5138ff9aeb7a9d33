"""ObjectStore: objects by key, with retries, multipart uploads and concurrent requests."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.errors import ObjectDamaged, ObjectNotFound, StorageError
from verl.storage.backend import MIB, AlreadyExists, Backend, Data, RetryPolicy, StoredObject, TransientError
from verl.utils.external_input import open_regular

MOST_PARTS = 10_000  # the limit of S3


class ObjectStore:
    """Objects of one storage, by key. Its methods may be called from several threads.

    Puts are atomic: one that failed, or whose process was killed, leaves no partial object.

    >>> from verl.storage.config import LocalStorage
    >>> store = LocalStorage(path="objects", prefix="docs").connect()
    >>> store.put("greeting", b"good morning")
    >>> bytes(store.get("greeting", 5, 9)), store.create("greeting", b"good night")
    (b'morn', False)

    Args:
        storage: the `verl.storage.config.Storage` that made it.
        backend: of that storage.

    Every method raises:
        StorageUnreachable: no answer after all retries.
        StorageRefused: no such bucket, no permission or no credentials, so that retries are useless.
    """

    def __init__(self, storage: Any, backend: Backend):
        self.storage, self.address = storage, storage.address
        self.backend = backend
        self._part_bytes = storage.part_mib * MIB
        self.retry = RetryPolicy(storage.retries, storage.backoff_s)
        self._threads = ThreadPoolExecutor(storage.concurrency, thread_name_prefix="storage")

    def __repr__(self) -> str:
        return f"ObjectStore({self.address!r})"

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, key: str) -> str:
        """Address for people."""
        return f"{self.address}/{key}"

    # -- putting ------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: Data) -> None:
        """Put an object, replacing any existing one; the transfer is verified by a checksum."""
        self.put_pieces(key, lambda: _cut(memoryview(data), self._part_bytes), len(data))

    def put_file(self, key: str, path: str | Path) -> int:
        """Put a file. Returns its size in bytes."""
        size = Path(path).stat().st_size

        def pieces() -> Iterator[bytes]:
            with open(open_regular(path), "rb") as file:
                while piece := file.read(self.part_bytes(size)):
                    yield piece

        self.put_pieces(key, pieces, size)
        return size

    def put_pieces(self, key: str, pieces: Callable[[], Iterable[Data]], size: int) -> None:
        """Put an object from an iterator of pieces.

        Args:
            key: of the object.
            pieces: returns an iterator of pieces of `part_bytes(size)`, the last one shorter. It is consumed as pieces
                are sent, and called again if the store cannot retry single parts; exceptions in it end the put.
            size: total size in bytes.
        Raises:
            ObjectDamaged: the pieces have another total size.
        """
        if size <= self._part_bytes:
            whole = b"".join(self._exactly(key, pieces(), size))
            self.retry(f"put {self.url(key)}", lambda: self.backend.put(key, whole))
        elif self.backend.has_parts:
            self._put_parts(key, pieces, size)
        else:
            self.retry(f"put {self.url(key)}", lambda: self.backend.put_stream(key, self._exactly(key, pieces(), size)))

    def create(self, key: str, data: Data) -> bool:
        """Put an object unless one exists.

        If the answer of the store is lost, an object with equal content counts as put by this call, so the content
        should be unique to the caller.

        Returns:
            Whether the object has this content now.
        """
        try:
            if not self.backend.is_conditional:
                if self.find(key) is None:
                    self.put(key, data)
                return self._holds(key, data)
            self.retry(f"create {self.url(key)}", lambda: self.backend.create(key, data))
        except AlreadyExists:
            return self._holds(key, data)
        return True

    # -- getting ------------------------------------------------------------------------------------------------------

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes | bytearray:
        """Bytes [begin, end) of an object; the whole object by default.

        Raises:
            ObjectNotFound: there is no such object.
            ObjectDamaged: it is shorter than `end`.
        """
        end = self.size(key) if end is None else end
        if end - begin <= self._part_bytes:
            return self._range(key, begin, end)
        data = bytearray()
        for piece in self.pieces(key, begin, end):
            data += piece
        return data

    def pieces(self, key: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes [begin, end) of an object in pieces, with concurrent prefetching."""
        starts = iter(range(begin, end, self._part_bytes))
        ahead: deque[Future[bytes]] = deque()
        try:
            while True:
                while len(ahead) < self.storage.concurrency and (start := next(starts, None)) is not None:
                    stop = min(start + self._part_bytes, end)
                    ahead.append(self._threads.submit(self._range, key, start, stop))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def size(self, key: str) -> int:
        """Size of an object in bytes.

        Raises:
            ObjectNotFound: there is no such object.
        """
        return self.retry(f"look at {self.url(key)}", lambda: self.backend.size(key))

    def find(self, key: str) -> StoredObject | None:
        """The object, or None."""
        try:
            return StoredObject(key, self.size(key))
        except ObjectNotFound:
            return None

    def list(self, prefix: str = "") -> list[StoredObject]:
        """All objects whose keys begin with `prefix`, sorted by key. Some stores list a new object only after a
        delay.
        """
        return self.retry(f"list {self.url(prefix)}", lambda: self.backend.list(prefix))

    def delete(self, key: str) -> None:
        """Delete an object; does nothing if there is none."""
        self.retry(f"delete {self.url(key)}", lambda: self.backend.delete(key))

    def close(self) -> None:
        """Close connections; pending requests fail."""
        self.retry.close()
        self._threads.shutdown(cancel_futures=True)
        self.backend.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def part_bytes(self, size: int) -> int:
        """Size of the pieces for an object of `size` bytes."""
        return max(self._part_bytes, math.ceil(size / MOST_PARTS))

    def _range(self, key: str, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        data = self.retry(f"get {self.url(key)}", lambda: self.backend.get(key, begin, end))
        if len(data) != end - begin:
            raise ObjectDamaged(f"{self.url(key)} has {begin + len(data)} bytes instead of {end} or more")
        return data

    def _put_parts(self, key: str, pieces: Callable[[], Iterable[Data]], size: int) -> None:
        url = self.url(key)
        token = self.retry(f"begin {url}", lambda: self.backend.begin(key))
        sent: list[str] = []
        under_way: deque[Future[str]] = deque()
        try:
            for number, piece in enumerate(self._exactly(key, pieces(), size), 1):
                if len(under_way) >= self.storage.concurrency:
                    sent.append(under_way.popleft().result())
                under_way.append(self._threads.submit(self._put_part, key, token, number, piece))
            sent += [future.result() for future in under_way]
            self.retry(f"finish {url}", lambda: self._finish(key, token, sent, size))
        except BaseException:
            for future in under_way:
                future.cancel()
            with contextlib.suppress(StorageError, TransientError):  # lifecycle rules delete them later
                self.backend.abort(key, token)
            raise

    def _put_part(self, key: str, token: str, number: int, piece: Data) -> str:
        what = f"put part {number} of {self.url(key)}"
        return self.retry(what, lambda: self.backend.put_part(key, token, number, piece))

    def _finish(self, key: str, token: str, parts: list[str], size: int) -> None:
        try:
            self.backend.finish(key, token, parts)
        except ObjectNotFound:  # completed by an earlier attempt whose answer was lost?
            if self.backend.size(key) != size:
                raise

    def _holds(self, key: str, data: Data) -> bool:
        return self.size(key) == len(data) and self.get(key, 0, len(data)) == bytes(data)

    def _exactly(self, key: str, pieces: Iterable[Data], size: int) -> Iterator[Data]:
        done = 0
        for piece in pieces:
            done += len(piece)
            if done <= size:
                yield piece
        if done != size:
            raise ObjectDamaged(f"{self.url(key)} should have {size} bytes, but the pieces have {done}")


def _cut(data: memoryview, size: int) -> Iterator[memoryview]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]
