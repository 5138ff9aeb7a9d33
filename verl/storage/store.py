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
from typing import Any, NamedTuple, Protocol, TypeVar

from verl.errors import ObjectDamaged, ObjectNotFound, StorageRefused, StorageUnreachable, VerlError
from verl.utils.external_input import ExternalInputError, checked_path
from verl.utils.progress import report
from verl.utils.redact import redact

T = TypeVar("T")

MIB = 2**20
LONGEST_BACKOFF_S = 30.0
LISTING_BYTES = 512 * MIB  # limit of a listing: the keys, and ENTRY_BYTES for each
ENTRY_BYTES = 150
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
        """The result of a request, which `what` describes. Raises StorageUnreachable if every attempt failed."""
        for number in range(self._retries + 1):
            report()  # every request has a time-out
            try:
                return _interruptible(request)
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


def _interruptible(request: Callable[[], T]) -> T:
    """The result of a request; in the main thread Ctrl-C ends the wait, since clients do not look for signals."""
    if threading.current_thread() is not threading.main_thread():
        return request()
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            answer.set_exception(error)

    threading.Thread(target=ask, name="storage_request", daemon=True).start()
    return answer.result()


Data = bytes | bytearray | memoryview


class StoredObject(NamedTuple):
    """An object of a store; `size` in bytes."""

    key: str
    size: int


class AlreadyExists(Exception):
    """A conditional put found an existing object."""


class Backend(Protocol):
    """Single requests to a store; keys are relative to the prefix of the storage.

    Methods raise `TransientError` for failures that may not recur, `ObjectNotFound`, or `StorageRefused`.

    Attributes:
        is_conditional: whether `create` is atomic.
    """

    is_conditional: bool

    def put(self, key: str, data: Data) -> None:
        """Put an object in one request, replacing any existing one."""

    def create(self, key: str, data: Data) -> None:
        """Put an object unless one exists. Raises AlreadyExists if one does."""

    def put_stream(self, key: str, pieces: Callable[[], Iterable[Data]], part_bytes: int) -> None:
        """Put a large object atomically, in parts, each repeated on its own. Raises StorageUnreachable after that."""

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of an object; fewer if it is shorter."""
        ...

    def size(self, key: str) -> int:
        """Size of an object in bytes."""
        ...

    def list(self, prefix: str) -> Iterable[StoredObject]:
        """All objects whose keys begin with `prefix`."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; does nothing if there is none."""


class LocalBackend(Backend):
    """A local directory. Objects are written to a temporary name, synced, and linked or renamed to their key."""

    is_conditional = True

    def __init__(self, root: Path):
        self._root = root

    def put(self, key: str, data: Data) -> None:
        self.put_stream(key, lambda: [data], 0)

    def put_stream(self, key: str, pieces: Callable[[], Iterable[Data]], part_bytes: int) -> None:
        with self._written(key, pieces()) as temporary:
            os.replace(temporary, self._path(key))

    def create(self, key: str, data: Data) -> None:
        with self._written(key, [data]) as temporary:
            try:
                os.link(temporary, self._path(key))
            except FileExistsError as error:
                raise AlreadyExists(key) from error

    def get(self, key: str, begin: int, end: int) -> bytes:
        with self._refusals(key), open(self._path(key), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def size(self, key: str) -> int:
        with self._refusals(key):
            return self._path(key).stat().st_size

    def list(self, prefix: str) -> list[StoredObject]:
        objects = []
        with self._refusals(prefix):
            for directory, _, names in os.walk(self._root / prefix.rpartition("/")[0]):
                for path in (Path(directory, name) for name in names if not name.startswith(".put-")):
                    key = path.relative_to(self._root).as_posix()
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        if key.startswith(prefix):
                            objects.append(StoredObject(key, path.stat().st_size))
        return sorted(objects)

    def delete(self, key: str) -> None:
        with self._refusals(key), contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        try:
            return self._root / checked_path(key)
        except ExternalInputError as error:
            raise StorageRefused(f"{self._root}: {error}") from error

    @contextlib.contextmanager
    def _written(self, key: str, pieces: Iterable[Data]) -> Iterator[Path]:
        """A synced file with these bytes, for the body to put in its place; that is synced too."""
        directory = self._path(key).parent
        temporary = directory / f".put-{secrets.token_hex(8)}"
        with self._refusals(key):
            directory.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)
            fd = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _refusals(self, key: str) -> Iterator[None]:
        try:
            yield
        except VerlError:  # raised by the iterator of pieces
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectNotFound(f"{self._path(key)} does not exist") from error
        except OSError as error:
            raise StorageRefused(f"{self._path(key)}: {error.strerror or error}") from error


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

    def put(self, key: str, data: Data) -> None:
        """Put an object, replacing any existing one."""
        self.put_pieces(key, lambda: [data], len(data))

    def put_file(self, key: str, path: str | Path) -> int:
        """Put a file. Returns its size in bytes."""
        size = Path(path).stat().st_size

        def pieces() -> Iterator[bytes]:
            with open(path, "rb") as file:
                yield from iter(lambda: file.read(self._part_bytes), b"")

        self.put_pieces(key, pieces, size)
        return size

    def put_pieces(self, key: str, pieces: Callable[[], Iterable[Data]], size: int) -> None:
        """Put an object from an iterator of pieces.

        Args:
            key: of the object.
            pieces: returns an iterator of pieces of any sizes. It is consumed as they are sent, and called again if the
                whole put is repeated; exceptions in it end the put.
            size: total size in bytes.
        Raises:
            ObjectDamaged: the pieces have another total size.
        """

        def send() -> None:
            if size <= self._part_bytes:
                self.backend.put(key, b"".join(self._exactly(key, pieces(), size)))
                return
            part_bytes = max(self._part_bytes, math.ceil(size / MOST_PARTS))
            self.backend.put_stream(key, lambda: self._exactly(key, pieces(), size), part_bytes)
            if (stored := self.size(key)) != size:  # repeated on its own
                raise TransientError(f"{key} has {stored} bytes after a put of {size}")

        self.retry(f"put {self.url(key)}", send)

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

    def read(self, key: str, limit: int) -> bytes:
        """The whole of a small object, in one request.

        Raises:
            ObjectNotFound: there is no such object.
            ObjectDamaged: it has more than `limit` bytes, or none.
        """
        data = self.retry(f"get {self.url(key)}", lambda: self.backend.get(key, 0, limit + 1))
        if not 0 < len(data) <= limit:
            raise ObjectDamaged(f"{self.url(key)} has {len(data)} bytes or more instead of 1 to {limit}")
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

    def find(self, key: str) -> int | None:
        """Size of an object in bytes; None if there is none."""
        with contextlib.suppress(ObjectNotFound):
            return self.size(key)
        return None

    def list(self, prefix: str = "") -> list[StoredObject]:
        """All objects whose keys begin with `prefix`, sorted by key. Some stores list a new object after a delay."""
        return self.retry(f"list {self.url(prefix)}", lambda: self._listed(prefix))

    def delete(self, key: str) -> None:
        """Delete an object; does nothing if there is none."""
        self.retry(f"delete {self.url(key)}", lambda: self.backend.delete(key))

    def close(self) -> None:
        """Close connections; pending requests fail."""
        self.retry.close()
        self._threads.shutdown(cancel_futures=True)

    def _range(self, key: str, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        data = self.retry(f"get {self.url(key)}", lambda: self.backend.get(key, begin, end))
        if len(data) != end - begin:
            raise ObjectDamaged(f"{self.url(key)} has {begin + len(data)} bytes instead of {end} or more")
        return data

    def _listed(self, prefix: str) -> list[StoredObject]:
        found: dict[str, StoredObject] = {}
        size_bytes = 0
        for stored in self.backend.list(prefix):
            size_bytes += ENTRY_BYTES + len(stored.key)
            if stored.key in found or size_bytes > LISTING_BYTES:
                raise ObjectDamaged(
                    f"{self.url(prefix)}: the store's listing has no end, or more than {LISTING_BYTES // MIB} MiB "
                    f"({len(found)} objects so far). Use a prefix (storage.prefix) with fewer objects, or delete what "
                    "is not needed there."
                )
            found[stored.key] = stored
        return sorted(found.values())

    def _holds(self, key: str, data: Data) -> bool:
        return self.size(key) == len(data) and self.get(key, 0, len(data)) == bytes(data)

    def _exactly(self, key: str, pieces: Iterable[Data], size: int) -> Iterator[Data]:
        done = 0
        for piece in pieces:
            report()  # every part has a time-out
            done += len(piece)
            if done <= size:
                yield piece
        if done != size:
            raise ObjectDamaged(f"{self.url(key)} should have {size} bytes, but the pieces have {done}")
