"""A request to a server: the server's settings, the request, the report about it, and a disk cache of answers."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from verl.component import Description, component

logger = logging.getLogger(__name__)

CACHE_NAME = "answers.sqlite3"
BUSY_TIMEOUT_S = 30.0  # while another process writes the cache
QUESTIONS_AT_A_TIME = 500

# refused:      the server refuses every request (wrong key, wrong path, a redirect)
# unreachable:  no answer arrived
# answer:       this request has no usable answer; others may have one
Kind = Literal["refused", "unreachable", "answer"]


class RetryableAnswer(Exception):
    """Raised by `Request.read`: the answer is unusable, and a retry may help; the message says why."""


class NotRetryable(RetryableAnswer):
    """The answer is unusable, and a retry would not help."""


class Request:
    """A request that is repeated until its answer is usable. Methods are called in the client's thread.

    Attributes:
        path: appended to the base URL.
    """

    path: str = ""

    def body(self) -> Any:
        """The body, to be sent as JSON; None for a GET. Called before each attempt, so that a retry may be smaller."""
        return None

    def parse(self, content: bytes) -> Any:
        """Parse the content of an answer; a ValueError makes it unusable."""
        return json.loads(content)

    def read(self, answer: Any) -> None:
        """Use the parsed answer.

        Raises:
            RetryableAnswer: it is unusable; the request is retried.
        """


@dataclass(frozen=True)
class RequestReport:
    """Report about a request.

    Attributes:
        seconds: latency of each attempt.
        failure: why it has no usable answer; None if it has one.
        kind: kind of the failure.
    """

    seconds: tuple[float, ...]
    failure: str | None = None
    kind: Kind | None = None

    @property
    def attempts(self) -> int:
        return len(self.seconds)


def encoded(body: Any) -> bytes:
    """Encode as canonical JSON; numbers and arrays of numpy and torch become plain numbers and lists.

    Raises:
        TypeError, ValueError: a value cannot be encoded as JSON.
    """
    return json.dumps(body, default=_plain, allow_nan=False, sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be encoded as JSON")


def key_of(url: str, body: object) -> str:
    """Cache key: a hash of the URL and the request body.

    Raises:
        TypeError, ValueError: the body cannot be encoded as JSON.
    """
    return hashlib.blake2b(url.encode() + b"\0" + encoded(body), digest_size=24).hexdigest()


class AnswerCache:
    """Texts by key, in SQLite. After a failure (full disk, damaged file) it warns once and is disabled.

    Args:
        directory: of the file; created if missing.
        max_gib: size limit; the oldest answers are deleted beyond it.
    """

    def __init__(self, directory: Path, max_gib: float):
        self.file, self._max_bytes = directory / CACHE_NAME, max_gib * 2**30
        self._lock = threading.Lock()
        self.connection: sqlite3.Connection | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(
                self.file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=NORMAL")
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE, text TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def find(self, keys: Iterable[str]) -> dict[str, str]:
        """The cached answers among these keys."""
        distinct, answers = list(dict.fromkeys(keys)), {}
        with self._lock:
            for start in range(0, len(distinct), QUESTIONS_AT_A_TIME):
                part = distinct[start : start + QUESTIONS_AT_A_TIME]
                marks = ",".join("?" * len(part))
                answers |= dict(self._run(f"SELECT key, text FROM answers WHERE key IN ({marks})", part))
        return answers

    def put(self, key: str, text: str) -> None:
        """Store an answer atomically, replacing an earlier one; it is on disk when this returns."""
        with self._lock:
            self._make_room()
            self._run("INSERT OR REPLACE INTO answers (key, text) VALUES (?, ?)", [key, text])

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        with self._lock:
            if self.connection is not None:
                self.connection.close()
                self.connection = None

    def _make_room(self) -> None:
        numbers = [self._run(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size")]
        if not all(numbers):
            return
        pages, free, size = (rows[0][0] for rows in numbers)
        if (pages - free) * size > self._max_bytes:
            oldest = "SELECT number FROM answers ORDER BY number LIMIT (SELECT count(*) / 10 + 1 FROM answers)"
            self._run(f"DELETE FROM answers WHERE number IN ({oldest})")

    def _run(self, statement: str, values: Iterable[str] = ()) -> list[tuple]:
        if self.connection is None:
            return []
        try:
            return self.connection.execute(statement, list(values)).fetchall()
        except sqlite3.Error as error:
            self._give_up(error)
            return []

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s: responses are no longer cached, %s: %s", self.file, type(error).__name__, error)
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@component
class EndpointSettings(Description):
    """Settings of `Endpoint`.

    Args:
        base_url: prefix of the URL of each request, such as `https://api.openai.com/v1`.
        key_variable: name of the environment variable with the API key; null for no key.
        key_header: header of the key: `Authorization` is sent as `Bearer KEY`, any other with the key only.
        headers: further headers of every request.
        max_concurrency: the most simultaneous requests.
        requests_per_minute: rate limit, including retries, evenly spaced; null for no limit.
        timeout_s: time-out of one attempt, from its start to the last byte of the answer.
        total_timeout_s: the longest time without any usable answer to a batch of requests, including retries. Each
            usable answer restarts it, so that a large batch may take longer.
        retries: the most retries of a request after a transient failure: no connection, no answer in time, status 408,
            425, 429 or 500 and above, an unusable answer.
        backoff_s: wait before the first retry, doubled for each further one up to a minute, less a random part of at
            most half. `Retry-After` of the server prolongs it and delays all requests.
        max_answer_mib: size limit of an answer.
    """

    base_url: str
    key_variable: str | None = None
    key_header: str = "Authorization"
    headers: dict[str, str] = field(default_factory=dict)
    max_concurrency: PositiveInt = 16
    requests_per_minute: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 60.0
    total_timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 600.0
    retries: NonNegativeInt = 5
    backoff_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    max_answer_mib: Annotated[float, Field(gt=0, lt=1e9)] = 16.0

    def url(self, path: str = "") -> str:
        """The address of a request."""
        return self.base_url.rstrip("/") + path

    @property
    def is_local(self) -> bool:
        """Whether requests stay on this machine."""
        return urlsplit(self.base_url).hostname in ("localhost", "127.0.0.1", "::1")
