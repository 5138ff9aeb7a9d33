"""A cache of answers on disk, shared by runs: what was asked once is not asked, waited for and paid again."""

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
    """What an answer is kept under: a hash of the address and of all that is sent, the model's name included.

    Raises:
        TypeError, ValueError: the body has no form in JSON.
    """
    return hashlib.blake2b(url.encode() + b"\0" + encoded(body), digest_size=24).hexdigest()


class AnswerCache:
    """Texts by key. One that fails, of a full disk or a damaged file, warns once and keeps nothing from then on.

    Args:
        directory: that holds it; made if it is absent.
        max_gib: the oldest answers make room when the file would grow beyond.
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
        """Those of the answers that are kept."""
        wanted, found = list(dict.fromkeys(keys)), {}
        with self._lock:
            for start in range(0, len(wanted), QUESTIONS_AT_A_TIME):
                part = wanted[start : start + QUESTIONS_AT_A_TIME]
                marks = ",".join("?" * len(part))
                found |= dict(self._run(f"SELECT key, text FROM answers WHERE key IN ({marks})", part))
        return found

    def put(self, key: str, text: str) -> None:
        """Keep an answer in place of an earlier one; it is on disk, whole or not at all, when this returns."""
        with self._lock:
            self._make_room()
            self._run("INSERT OR REPLACE INTO answers (key, text) VALUES (?, ?)", [key, text])

    def close(self) -> None:
        """Close the file; called again, do nothing."""
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
