"""ObjectStore: objects by key, with retries, multipart uploads and concurrent requests, over one small `Backend`.

A backend carries out one request; the simplest one is a local directory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from verl.errors import ObjectDamaged, ObjectNotFound, StorageError, StorageRefused, StorageUnreachable, VerlError
from verl.utils.external_input import ExternalInputError, checked_path, open_regular
from verl.utils.progress import report
from verl.utils.redact import redact

T = TypeVar("T")

LONGEST_BACKOFF_S = 30.0
log = logging.getLogger(__name__)
MOST_PARTS = 10_000  # the limit of S3


class TransientError(Exception):
    """A failure that may not recur: no connection, no answer in time, an overloaded server."""


class RetryPolicy:
    """Repeats a request after transient failures, with exponential backoff and jitter.

    Args:
        retries: the most retries after the first attempt.
        backoff_s: wait before the first retry, in seconds.
    """

    def __init__(self, retries: int, backoff_s: float):
        self._retries, self._backoff_s = retries, backoff_s
        self._chance = random.Random()  # separate generator: training must not depend on retries
        self._closed = threading.Event()

    def __call__(self, what: str, request: Callable[[], T]) -> T:
        """Return the result of the request.

        Args:
            what: description for messages, such as `put s3://models/a`.
            request: the function to call.
        Raises:
            StorageUnreachable: every attempt failed.
        """
        for number in range(self._retries + 1):
            report()  # every request has a time-out
            try:
                return request()
            except TransientError as error:
                reason = redact(f"{type(error.__cause__ or error).__name__}: {error}")
                longest = min(self._backoff_s * 2**number, LONGEST_BACKOFF_S)
                pause_s = longest * self._chance.uniform(0.5, 1.0)  # failures at one time are retried at several
                if number == self._retries or self._closed.wait(pause_s):
                    raise StorageUnreachable(f"{what} failed {number + 1} times, at last with {reason}") from error
                log.info("%s: retrying after %s", what, reason)
        raise AssertionError("the last attempt returned or raised")

    def close(self) -> None:
        """Abort all waits; requests that are being retried fail at once."""
        self._closed.set()


Data = bytes | bytearray | memoryview


class StoredObject(NamedTuple):
    """An object of a store; `size` in bytes."""

    key: str
    size: int


class AlreadyExists(Exception):
    """A conditional put found an existing object."""


class Backend:
    """Single requests to a store, without retries; keys are relative to the prefix of the storage.

    Methods raise `TransientError` for failures that may not recur, `ObjectNotFound`, or `StorageRefused`.

    Attributes:
        has_parts: whether multipart uploads are supported: `begin`, `put_part`, `finish`, `abort`.
        is_conditional: whether `create` is atomic.
    """

    has_parts = False
    is_conditional = True

    def put(self, key: str, data: Data) -> None:
        """Put an object in one request, replacing any existing one."""
        raise NotImplementedError

    def create(self, key: str, data: Data) -> None:
        """Put an object unless one exists. Raises AlreadyExists if one does."""
        raise NotImplementedError

    def put_stream(self, key: str, pieces: Iterable[Data]) -> None:
        """Put a large object atomically. For stores without multipart uploads."""
        raise NotImplementedError

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of an object; fewer if it is shorter."""
        raise NotImplementedError

    def size(self, key: str) -> int:
        """Size of an object in bytes."""
        raise NotImplementedError

    def list(self, prefix: str) -> list[StoredObject]:
        """All objects whose keys begin with `prefix`, sorted by key."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Delete an object; does nothing if there is none."""
        raise NotImplementedError

    def begin(self, key: str) -> str:
        """Start a multipart upload; returns its token."""
        raise NotImplementedError

    def put_part(self, key: str, token: str, number: int, data: Data) -> str:
        """Put part `number`, from 1; returns its tag for `finish`."""
        raise NotImplementedError

    def finish(self, key: str, token: str, parts: list[str]) -> None:
        """Complete a multipart upload from the tags of its parts."""
        raise NotImplementedError

    def abort(self, key: str, token: str) -> None:
        """Abort a multipart upload and delete its parts."""
        raise NotImplementedError

    def close(self) -> None:
        """End connections."""


class LocalBackend(Backend):
    """A local directory. Objects are written to a temporary name, synced, and linked or renamed to their key."""

    def __init__(self, root: Path):
        self._root = root

    def put(self, key: str, data: Data) -> None:
        self.put_stream(key, [data])

    def put_stream(self, key: str, pieces: Iterable[Data]) -> None:
        with self._refusals(key):
            os.replace(self._written(key, pieces), self._path(key))
            self._sync(self._path(key).parent)

    def create(self, key: str, data: Data) -> None:
        with self._refusals(key):
            temporary = self._written(key, [data])
            try:
                os.link(temporary, self._path(key))
            except FileExistsError as error:
                raise AlreadyExists(key) from error
            finally:
                temporary.unlink()
            self._sync(self._path(key).parent)

    def get(self, key: str, begin: int, end: int) -> bytes:
        with self._refusals(key), open(open_regular(self._path(key)), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def size(self, key: str) -> int:
        with self._refusals(key):
            return self._path(key).stat().st_size

    def list(self, prefix: str) -> list[StoredObject]:
        objects, inside = [], self._root / prefix.rpartition("/")[0]
        with self._refusals(prefix):
            for directory, _, names in os.walk(inside):
                paths = [Path(directory, name) for name in names if not name.startswith(".put-")]
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        objects.append(StoredObject(path.relative_to(self._root).as_posix(), path.stat().st_size))
        return sorted(stored for stored in objects if stored.key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._refusals(key), contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        try:
            return self._root / checked_path(key)
        except ExternalInputError as error:
            raise StorageRefused(f"{self._root}: {error}") from error

    def _written(self, key: str, pieces: Iterable[Data]) -> Path:
        directory = self._path(key).parent
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".put-{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    @staticmethod
    def _sync(directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _refusals(self, key: str):
        try:
            yield
        except VerlError:  # raised by the iterator of pieces
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectNotFound(f"{self._path(key)} does not exist") from error
        except OSError as error:
            raise StorageRefused(f"{self._path(key)}: {error.strerror or error}") from error


MIB = 2**20


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
