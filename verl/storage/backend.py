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
from verl.utils.external_input import ExternalInputError, checked_path
from verl.utils.progress import report
from verl.utils.redact import redact

T = TypeVar("T")

LONGEST_BACKOFF_S = 30.0
log = logging.getLogger(__name__)


class TransientError(Exception):
    """What may be otherwise the next time: no connection, no answer in time, a server that is overloaded."""


class RetryPolicy:
    """Makes requests until one is answered.

    Args:
        retries: after the first try.
        backoff_s: before the first retry.
    """

    def __init__(self, retries: int, backoff_s: float):
        self._retries, self._backoff_s = retries, backoff_s
        self._chance = random.Random()  # of its own: the random numbers of a training stay as they are
        self._closed = threading.Event()

    def __call__(self, what: str, request: Callable[[], T]) -> T:
        """The answer.

        Args:
            what: is asked, for messages, such as `put s3://models/a`.
        Raises:
            StorageUnreachable: no try was answered.
        """
        for number in range(self._retries + 1):
            report()  # a request is bounded by itself
            try:
                return request()
            except TransientError as error:
                said = redact(f"{type(error.__cause__ or error).__name__}: {error}")
                if number == self._retries or self._closed.wait(self._pause_s(number)):
                    raise StorageUnreachable(f"{what} failed {number + 1} times, at last with {said}") from error
                log.info("%s: asking again after %s", what, said)
        raise AssertionError("the last try returned or raised")

    def close(self) -> None:
        """End every wait: what is being asked again fails now."""
        self._closed.set()

    def _pause_s(self, number: int) -> float:
        longest = min(self._backoff_s * 2**number, LONGEST_BACKOFF_S)
        return longest * self._chance.uniform(0.5, 1.0)  # so that many that failed at once do not come back at once


Data = bytes | bytearray | memoryview


class StoredObject(NamedTuple):
    """An object of a store; `size` in bytes."""

    key: str
    size: int


class AlreadyExists(Exception):
    """A conditional put found an object there."""


class Backend:
    """Single requests; keys are relative to the prefix of the storage.

    Each method raises `TransientError` for what may be otherwise the next time, ObjectNotFound, or StorageRefused.

    Attributes:
        has_parts: an object may be put in parts, each retried alone: `begin`, `put_part`, `finish`, `abort`.
        is_conditional: `create` is one operation of the store.
    """

    has_parts = False
    is_conditional = True

    def put(self, key: str, data: Data) -> None:
        """Put an object of one request, whatever is there."""
        raise NotImplementedError

    def create(self, key: str, data: Data) -> None:
        """Put it unless there is one. Raises Taken where there is."""
        raise NotImplementedError

    def put_stream(self, key: str, pieces: Iterable[Data]) -> None:
        """Put a long object; it is there as a whole or not at all. For stores without parts of their own."""
        raise NotImplementedError

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Bytes of an object; fewer where it ends."""
        raise NotImplementedError

    def size(self, key: str) -> int:
        """Of an object, in bytes."""
        raise NotImplementedError

    def list(self, prefix: str) -> list[StoredObject]:
        """All whose keys begin so, in order."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Delete; one that is not there is deleted already."""
        raise NotImplementedError

    def begin(self, key: str) -> str:
        """Begin an object of parts; gives its token."""
        raise NotImplementedError

    def put_part(self, key: str, token: str, number: int, data: Data) -> str:
        """Put part `number`, from 1; gives what `finish` wants of it."""
        raise NotImplementedError

    def finish(self, key: str, token: str, parts: list[str]) -> None:
        """Put the parts together."""
        raise NotImplementedError

    def abort(self, key: str, token: str) -> None:
        """Give the parts up."""
        raise NotImplementedError

    def close(self) -> None:
        """End connections."""


class LocalBackend(Backend):
    """A directory. An object is written under another name, made durable, and linked or renamed into its place."""

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
        with self._refusals(key), open(self._path(key), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def size(self, key: str) -> int:
        with self._refusals(key):
            return self._path(key).stat().st_size

    def list(self, prefix: str) -> list[StoredObject]:
        found, inside = [], self._root / prefix.rpartition("/")[0]
        with self._refusals(prefix):
            for directory, _, names in os.walk(inside):
                paths = [Path(directory, name) for name in names if not name.startswith(".put-")]
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):  # deleted while we look
                        found.append(StoredObject(path.relative_to(self._root).as_posix(), path.stat().st_size))
        return sorted(stored for stored in found if stored.key.startswith(prefix))

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
        except VerlError:  # of whoever gives the pieces
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectNotFound(f"{self._path(key)} is not there") from error
        except OSError as error:
            raise StorageRefused(f"{self._path(key)}: {error.strerror or error}") from error


MIB = 2**20
