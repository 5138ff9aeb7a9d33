"""A disk cache of answers, shared by runs, so that equal requests are sent and paid for only once."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

from verl.http_client.request import encoded

logger = logging.getLogger(__name__)

NAME = "answers.sqlite3"
BUSY_TIMEOUT_S = 30.0  # while another process writes
QUESTIONS_AT_A_TIME = 500


def default_directory() -> Path:
    """`$VERL_CACHE/remote`, by default `~/.cache/verl/remote`."""
    return Path(os.environ.get("VERL_CACHE") or Path.home() / ".cache" / "verl").expanduser() / "remote"


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
        self.file, self._max_bytes = directory / NAME, max_gib * 2**30
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
        asked, answers = list(dict.fromkeys(keys)), {}
        with self._lock:
            for start in range(0, len(asked), QUESTIONS_AT_A_TIME):
                part = asked[start : start + QUESTIONS_AT_A_TIME]
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
