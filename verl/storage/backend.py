"""One request to a store, its retry policy, and the simplest store, a local directory."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from verl.errors import ObjectNotFound, StorageRefused, StorageUnreachable, VerlError
from verl.utils.external_input import ExternalInputError, checked_path, open_regular
from verl.utils.progress import report
from verl.utils.redact import redact

T = TypeVar("T")

LONGEST_BACKOFF_S = 30.0
log = logging.getLogger(__name__)


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
